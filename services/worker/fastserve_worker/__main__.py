"""`python -m fastserve_worker --state URL --model-dir DIR`."""

import sys
from functools import partial

from fastserve_common.lifecycle import run_service
from fastserve_common.logs import setup_logs
from fastserve_common.settings import SettingsError
from fastserve_common.tls import adopt_identity
from fastserve_worker.settings import WorkerSettings
from fastserve_worker.worker import EXIT_SETTINGS, run_worker


def main() -> int:
    try:
        settings = WorkerSettings.load(sys.argv[1:], prog="fastserve-worker")
        adopt_identity(settings)
    except SettingsError as error:
        sys.stderr.write(f"fastserve-worker: {error}\n")
        return EXIT_SETTINGS
    setup_logs(f"stage-{settings.stage}", level=settings.log_level, log_format=settings.log_format)
    return run_service(partial(run_worker, settings))


if __name__ == "__main__":
    sys.exit(main())
