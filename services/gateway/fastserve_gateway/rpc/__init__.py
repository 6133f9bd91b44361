"""The gRPC API: fastserve.v1.Inference."""
