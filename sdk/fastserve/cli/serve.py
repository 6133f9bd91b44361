"""`fastserve serve MODEL`: everything that serves a model, on this machine, as one command."""

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastserve.cli import checks, specs
from fastserve.cli.model import prepare
from fastserve.cli.readiness import gateway_ready
from fastserve.cli.reporter import Reporter
from fastserve.cli.rundir import RunDir
from fastserve.cli.settings import ServeSettings
from fastserve.cli.specs import Model
from fastserve.cli.supervisor import StartError, StoppedError, Supervisor
from fastserve_common.lifecycle import run_service
from fastserve_common.state import open_state

EXIT_FAILED = 1


def run(argv: Sequence[str]) -> int:
    """Raises SettingsError for what cannot be served."""
    settings = ServeSettings.load(argv, prog="fastserve serve", positional="model")
    checks.check_serve(settings)
    run_dir = RunDir.open(settings.run_dir)
    try:
        app = _App(settings, run_dir, Reporter())
        return run_service(app.main, on_force=app.on_force)
    finally:
        run_dir.close()


@dataclass(slots=True)
class _App:
    settings: ServeSettings
    run_dir: RunDir
    reporter: Reporter
    supervisor: Supervisor | None = None

    async def main(self, stop: asyncio.Event) -> int:
        state = open_state(self.run_dir.state_url)
        settings = self.settings
        supervisor = Supervisor(state, self.reporter, self.run_dir.log_path, settings.log_level, stop)
        self.supervisor = supervisor
        try:
            await self._start(supervisor, stop)
            await supervisor.watch()
            self.reporter.line("stopping")
            return 0
        except StoppedError:
            return 0
        except StartError as error:
            self.reporter.line(f"fastserve: {error}", style="red")
            return EXIT_FAILED
        finally:
            self.reporter.hide()
            await supervisor.stop_all()
            await state.close()

    def on_force(self) -> None:
        """A second signal: nothing is waited for, nothing is left behind."""
        if self.supervisor is not None:
            self.supervisor.kill_all()
        self.run_dir.close()

    async def _start(self, supervisor: Supervisor, stop: asyncio.Event) -> None:
        settings, state_url, reporter = self.settings, self.run_dir.state_url, self.reporter
        with reporter.phase(f"preparing {settings.model}") as phase:
            model = await prepare(settings, phase, stop)
            if model is None:
                raise StoppedError
            checks.check_model(settings, model.model_dir)
        kvstores = specs.kvstores(settings, state_url)
        if kvstores:
            supervisor.start(*kvstores)
        workers = specs.workers(settings, state_url, model)
        with reporter.phase(f"loading {len(workers)} stage{'s' if len(workers) > 1 else ''}"):
            supervisor.start(*workers)
            await supervisor.until_registered(*workers, *kvstores)
        with reporter.phase("starting the scheduler"):
            scheduler = specs.scheduler(settings, state_url, model)
            supervisor.start(scheduler)
            await supervisor.until_registered(scheduler)
        with reporter.phase("starting the gateway"):
            gateway = specs.gateway(settings, state_url, model, port=settings.port, grpc_port=settings.bound_grpc_port)
            supervisor.start(gateway)
            (where,) = await supervisor.until_registered(gateway)
        with reporter.phase("getting ready") as phase:
            await supervisor.unless_dead(
                gateway_ready(where["http"], phase.detail, tls=settings.ssl_certfile is not None)
            )
        self._keep_ports(supervisor, model, where)
        self._announce(where, model)

    def _keep_ports(self, supervisor: Supervisor, model: Model, where: Mapping[str, str]) -> None:
        """A gateway that is started again listens where clients know it to be."""
        grpc_port = _port(where["grpc"]) if where.get("grpc") else -1
        (child,) = supervisor.children[-1]
        child.spec = specs.gateway(
            self.settings, self.run_dir.state_url, model, port=_port(where["http"]), grpc_port=grpc_port
        )

    def _announce(self, where: Mapping[str, str], model: Model) -> None:
        settings = self.settings
        name = settings.served_model_name[0] if settings.served_model_name else model.root
        scheme = "http" if settings.ssl_certfile is None else "https"
        url = f"{scheme}://{where['http']}"
        lines = ["", f"FastServe serves {name}", f"  HTTP  {url}/v1"]
        if where.get("grpc"):
            lines.append(f"  gRPC  {where['grpc']}")
        lines.append(f"  logs  {self.run_dir.path}/logs")
        needs_key = bool(settings.api_key or settings.api_key_file)
        lines += ["", "Try it:", "", f"  {_curl(url, name, needs_key)}", "", "Ctrl-C stops it."]
        self.reporter.result("\n".join(lines))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _curl(url: str, model: str, needs_key: bool) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a queue?"}}], "max_tokens": 64}}'
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
