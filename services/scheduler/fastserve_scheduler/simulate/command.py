"""`fastserve simulate`: run, report, save."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastserve_common.lifecycle import EXIT_USAGE
from fastserve_common.load.traces import TraceError
from fastserve_common.settings import SettingsError
from fastserve_scheduler.journal import JournalWriter
from fastserve_scheduler.sim.fleet import Fleet, Outcome, Plant
from fastserve_scheduler.sim.report import Result, Setup, to_result
from fastserve_scheduler.sim.router import ROUTERS
from fastserve_scheduler.simulate import system, tables, workload
from fastserve_scheduler.simulate.plot import PlotError, save_plot
from fastserve_scheduler.simulate.settings import SimulateSettings
from fastserve_scheduler.simulate.workload import Load

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def main(argv: Sequence[str]) -> int:
    """0, or 2 for what cannot be simulated, with a sentence on standard error."""
    try:
        settings = SimulateSettings.load(argv, prog="fastserve simulate")
        return run(settings, Console(), Console(stderr=True))
    except SettingsError as error:
        sys.stderr.write(f"fastserve: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run(settings: SimulateSettings, console: Console, error_console: Console) -> int:
    """Raises SettingsError."""
    name, plant = system.build(settings)
    load = workload.choose_load(settings, plant)
    results, outcomes = [], []
    for policy in settings.policies:
        config = replace(plant.config, policy=policy)
        outcome = simulate(settings, replace(plant, config=config), load, policy, error_console)
        outcomes.append(outcome)
        results.append(to_result(_setup(settings, name, load, policy, outcome), outcome))
    console.print(tables.report(settings, plant, load, results))
    _save(settings, results, outcomes)
    return 0 if all(result["completed"] for result in results) else EXIT_FAILED


def simulate(settings: SimulateSettings, plant: Plant, load: Load, policy: str, console: Console) -> Outcome:
    """One policy. Raises SettingsError."""
    source, follow_up = workload.requests(settings, plant, load)
    writer = None if settings.record is None else JournalWriter(settings.record, plant.config, plant.profile)
    fleet = Fleet(
        plant,
        num_replicas=settings.replicas,
        router=ROUTERS[settings.router](settings.seed),
        check=settings.check,
        log=None if writer is None else writer.record,
    )
    try:
        with _progress(settings, policy, console) as progress:
            return fleet.run(source, follow_up=follow_up, progress=progress)
    except (TraceError, ValueError) as error:
        raise SettingsError(f"--trace: {error}" if settings.trace is not None else str(error)) from error
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def _progress(settings: SimulateSettings, policy: str, console: Console) -> Iterator[Callable[[int], None]]:
    """A bar on the error stream, so that the result can be piped."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = settings.progress and console.is_terminal
    # Programs bring more requests than programs arrive; then the end is not known.
    total = None if settings.workload == "programs" or settings.duration is not None else settings.num_requests
    with Progress(*columns, console=console, refresh_per_second=4, disable=not shown) as bar:
        task = bar.add_task(policy, total=total)
        yield lambda ended: bar.update(task, completed=ended)


def _setup(settings: SimulateSettings, name: str, load: Load, policy: str, outcome: Outcome) -> Setup:
    rate: float | str = "trace" if load.rate is None else load.rate
    shape = "trace" if settings.trace is not None else settings.workload
    metadata = {
        "policy": policy,
        "device": "profile" if settings.profile is not None else settings.device,
        "tensor_parallel": settings.tp,
        "pipeline_stages": settings.pp,
        "replicas": settings.replicas,
        "router": settings.router,
        "lengths": settings.trace_format if settings.trace is not None else settings.lengths,
        "capacity": load.capacity,
        "limits": settings.limits,
        "hint_error": settings.hint_error,
        "kv_policy": outcome.plant.config.kv_policy,
        "max_num_seqs": settings.max_num_seqs,
        "seed": settings.seed,
    }
    return Setup(
        model=name,
        request_rate=rate,
        burstiness=settings.burstiness,
        arrivals="gamma" if shape == "steady" else shape,
        metadata=metadata,
        slo_ms=settings.slo_ms(),
        drop_first=settings.drop_first,
        drop_last=settings.drop_last,
        detailed=settings.detailed,
    )


def _save(settings: SimulateSettings, results: list[Result], outcomes: list[Outcome]) -> None:
    if settings.output is not None:
        content: object = results if settings.compare else results[0]
        _write(settings.output, json.dumps(content) + "\n")
    if settings.plot is not None:
        try:
            save_plot(list(zip(settings.policies, outcomes, strict=True)), settings.plot)
        except PlotError as error:
            raise SettingsError(str(error)) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output: cannot write {path}: {error.strerror}") from error
