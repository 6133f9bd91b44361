"""`python -m fastserve_scheduler FLAGS`."""

import asyncio
import sys

from fastserve_common.lifecycle import EXIT_USAGE, run_service
from fastserve_common.logs import setup_logs
from fastserve_common.settings import SettingsError
from fastserve_common.state import StateError
from fastserve_common.tls import adopt_identity
from fastserve_common.tracing import close_tracing, setup_tracing
from fastserve_scheduler import app, profile_only
from fastserve_scheduler.settings import SchedulerSettings

EXIT_FAILED = 1


def main(argv: list[str]) -> int:
    try:
        settings = SchedulerSettings.load(argv, prog="fastserve-scheduler")
        adopt_identity(settings)
        setup_tracing("scheduler", settings.otlp_endpoint)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    setup_logs("scheduler", level=settings.log_level, log_format=settings.log_format)

    async def serve(stop: asyncio.Event) -> int:
        run = profile_only.run if settings.profile_only else app.run
        return await run(settings, stop)

    try:
        return run_service(serve)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except (StateError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    finally:
        close_tracing()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
