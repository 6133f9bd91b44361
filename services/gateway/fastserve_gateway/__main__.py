"""`python -m fastserve_gateway`."""

import asyncio
import sys

from fastserve_common.lifecycle import run_service
from fastserve_common.logs import setup_logs
from fastserve_common.settings import SettingsError
from fastserve_common.state import StateError
from fastserve_common.tls import adopt_identity
from fastserve_common.tracing import close_tracing, setup_tracing
from fastserve_gateway.server import check_tls, running
from fastserve_gateway.settings import GatewaySettings
from fastserve_gateway.text.files import ModelFilesError

#: Exit status when the settings, or what they name, are wrong.
EXIT_USAGE = 2


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    async with running(settings):
        await stop.wait()


def main() -> int:
    try:
        settings = GatewaySettings.load(sys.argv[1:], prog="fastserve-gateway")
        setup_logs("gateway", level=settings.log_level, log_format=settings.log_format)
        check_tls(settings)
        adopt_identity(settings)
        setup_tracing("gateway", settings.otlp_endpoint)
        return run_service(lambda stop: serve(settings, stop))
    except (SettingsError, ModelFilesError, StateError, OSError, ValueError) as error:
        sys.stderr.write(f"fastserve-gateway: {error}\n")
        return EXIT_USAGE
    finally:
        close_tracing()


if __name__ == "__main__":
    sys.exit(main())
