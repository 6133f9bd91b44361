"""The gateway: text, the OpenAI HTTP API, the gRPC API, authentication and limits. Keeps no state of its own."""
