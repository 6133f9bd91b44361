"""`fastserve profile MODEL`: measure this machine with this model, so that `serve` need not."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastserve.cli import checks, specs
from fastserve.cli.model import prepare
from fastserve.cli.reporter import Reporter
from fastserve.cli.rundir import RunDir
from fastserve.cli.settings import ProfileSettings
from fastserve.cli.specs import STOP_MARGIN_S, ChildSpec
from fastserve.cli.supervisor import StartError, StoppedError, Supervisor
from fastserve_common.lifecycle import run_service
from fastserve_common.state import open_state

EXIT_FAILED = 1
EXIT_STOPPED = 130


def run(argv: Sequence[str]) -> int:
    """Raises SettingsError for what cannot be measured."""
    settings = ProfileSettings.load(argv, prog="fastserve profile", positional="model")
    checks.check_engine(settings)
    run_dir = RunDir.open(settings.run_dir)
    try:
        app = _App(settings, run_dir, Reporter())
        return run_service(app.main, on_force=app.on_force)
    finally:
        run_dir.close()


@dataclass(slots=True)
class _App:
    settings: ProfileSettings
    run_dir: RunDir
    reporter: Reporter
    supervisor: Supervisor | None = None

    async def main(self, stop: asyncio.Event) -> int:
        state = open_state(self.run_dir.state_url)
        supervisor = Supervisor(state, self.reporter, self.run_dir.log_path, self.settings.log_level, stop)
        self.supervisor = supervisor
        try:
            return await self._measure(supervisor, stop)
        except StoppedError:
            return EXIT_STOPPED
        except StartError as error:
            self.reporter.line(f"fastserve: {error}", style="red")
            return EXIT_FAILED
        finally:
            self.reporter.hide()
            await supervisor.stop_all()
            await state.close()

    def on_force(self) -> None:
        if self.supervisor is not None:
            self.supervisor.kill_all()
        self.run_dir.close()

    async def _measure(self, supervisor: Supervisor, stop: asyncio.Event) -> int:
        settings, state_url = self.settings, self.run_dir.state_url
        with self.reporter.phase(f"preparing {settings.model}") as phase:
            model = await prepare(settings, phase, stop)
            if model is None:
                raise StoppedError
            checks.check_model(settings, model.model_dir)
        workers = specs.workers(settings, state_url, model)
        with self.reporter.phase(f"loading {len(workers)} stages"):
            supervisor.start(*workers)
            await supervisor.until_registered(*workers)
        with self.reporter.phase("measuring"):
            result_path = self.run_dir.path / "profile.txt"
            argv = specs.profile_argv(settings, state_url)
            await supervisor.run_to_end(ChildSpec("profile", "", "", argv, STOP_MARGIN_S, stdout_path=result_path))
        self.reporter.result(result_path.read_text().rstrip())
        return 0
