"""`python -m fastserve_common.healthcheck HOST:PORT`: asks a server's `grpc.health.v1` once, for probes of containers.

Where the services know each other by certificates, the probe shows the service's own: from `--tls-*`, or from the
same variables as the service, which are all that it reads of them.

Exit status 0: it serves. 1: it does not, with a sentence on standard error. 2: wrong flags.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastserve_common.settings import SettingsError
from fastserve_common.tls import Identity, add_tls_arguments, given_identity

EXIT_UNHEALTHY = 1
EXIT_USAGE = 2
TIMEOUT_S = 3.0

_SERVING = health_pb2.HealthCheckResponse.SERVING


def problem(
    address: str,
    service: str = "",
    *,
    any_answer: bool = False,
    timeout_s: float = TIMEOUT_S,
    identity: Identity | None = None,
) -> str:
    """Why the server at `address` (HOST:PORT) is not healthy; empty when it is.

    `service`: whose health is asked for; empty: the whole server's. `any_answer`: NOT_SERVING will do. `identity`:
    None: in the clear.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    with _channel(address, identity) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs name no methods
            answer = stub.Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{address} did not answer: {error.code().name}"
    if any_answer or answer.status == _SERVING:
        return ""
    return f"{address} says {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _channel(address: str, identity: Identity | None) -> grpc.Channel:
    if identity is None:
        return grpc.insecure_channel(address)
    options = (("grpc.ssl_target_name_override", identity.name),)
    return grpc.secure_channel(address, identity.channel_credentials(), options=options)


def main(argv: Sequence[str]) -> int:
    # Not a settings class: the other variables and the file of the service in this container are none of ours.
    parser = argparse.ArgumentParser(prog="fastserve-healthcheck", description="Ask a server whether it serves.")
    parser.add_argument("address", help="HOST:PORT of the gRPC server")
    parser.add_argument("--service", default="", help="whose health is asked for (default: the whole server's)")
    parser.add_argument("--any-answer", action="store_true", help="be content with a process that answers at all")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="default: %(default)s")
    add_tls_arguments(parser)
    args = parser.parse_args(argv)
    try:
        identity = given_identity(args)
        why = problem(args.address, args.service, any_answer=args.any_answer, timeout_s=args.timeout, identity=identity)
    except (OSError, SettingsError) as error:
        sys.stderr.write(f"fastserve-healthcheck: {error}\n")
        return EXIT_USAGE
    if why:
        sys.stderr.write(f"fastserve-healthcheck: {why}\n")
    return EXIT_UNHEALTHY if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
