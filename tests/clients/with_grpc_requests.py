"""Run by the interpreter that has grpc-requests: ADDRESS CERTIFICATE KEY. Has no stubs: reflection, over TLS."""

import json
import sys
from pathlib import Path

import grpc
from grpc_requests import Client  # type: ignore[import-not-found]  # in an environment of its own

address, certificate, key = sys.argv[1:]


class Key(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Shows the key with every call, reflection included."""

    def _call(self, continuation, details, request):  # type: ignore[no-untyped-def]
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {key}")]
        return continuation(details._replace(metadata=metadata), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _call


client = Client(
    address,
    ssl=True,
    credentials={"root_certificates": Path(certificate).read_bytes()},
    interceptors=[Key()],
)
service = client.service("fastserve.v1.Inference")
request = {"text": "x", "temperature": 0, "stopping": {"max_new_tokens": 5, "ignore_eos": True}}
whole = service.Generate(request)
pieces = list(service.GenerateStream(request))
sys.stdout.write(
    json.dumps(
        {
            "services": sorted(client.service_names),
            "whole": whole["outputs"][0]["text"],
            "stream": "".join(output.get("text", "") for piece in pieces for output in piece.get("outputs", [])),
            "usage": whole["usage"]["completion_tokens"],
        }
    )
)
