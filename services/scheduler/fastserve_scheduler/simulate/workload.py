"""From settings to requests, at the rate that was asked for or at a share of what the system can take."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from fastserve_common.load.lengths import MODELS as LENGTHS
from fastserve_common.load.traces import TraceError
from fastserve_common.settings import SettingsError
from fastserve_scheduler.sim import arrivals
from fastserve_scheduler.sim.arrivals import DrawLengths, Rates, Request, Trace
from fastserve_scheduler.sim.callers import Callers
from fastserve_scheduler.sim.capacity import capacity
from fastserve_scheduler.sim.fleet import FollowUp, Plant
from fastserve_scheduler.sim.programs import Programs
from fastserve_scheduler.simulate.settings import DEFAULT_LOAD, SimulateSettings

SAMPLED_ROWS = 4096
"""Rows of a trace whose lengths stand for it while capacity is measured."""

_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` in requests per second (programs: of programs); None for a trace at its own pace."""

    rate: float | None
    capacity: float | None


def choose_load(settings: SimulateSettings, plant: Plant) -> Load:
    """Measures capacity when a share of it was asked for. Raises SettingsError."""
    if settings.rate is not None:
        return Load(settings.rate, None)
    if settings.trace is not None and settings.load_share is None:
        return Load(None, None)
    try:
        served = capacity(plant, _draw(settings, plant), settings.seed) * settings.replicas
    except ValueError as error:
        raise SettingsError(f"--load-share: {error}") from error
    calls = settings.mean_calls if settings.workload == "programs" and settings.trace is None else 1.0
    return Load((settings.load_share or DEFAULT_LOAD) * served / calls, served)


def requests(settings: SimulateSettings, plant: Plant, load: Load) -> tuple[Iterator[Request], FollowUp | None]:
    """Lazily, and what follows from their answers. Drawn anew at each call: equal for every policy."""
    source, follow_up = _source(settings, plant, load)
    room = min(plant.config.max_model_len, plant.num_blocks * plant.config.block_size)
    callers = Callers(settings.seed, room if settings.limits == "unknown" else None, settings.hint_error)
    source = map(callers.says, source)
    if settings.duration is not None:
        end_ns = round(settings.duration * _S)
        source = itertools.takewhile(lambda request: request.at_ns <= end_ns, source)
    if follow_up is not None:
        follow_up = _said_by(callers, follow_up)
    return itertools.islice(source, settings.num_requests), follow_up


def _said_by(callers: Callers, follow_up: FollowUp) -> FollowUp:
    def following(request: Request, now_ns: int) -> Request | None:
        found = follow_up(request, now_ns)
        return None if found is None else callers.says(found)

    return following


def _source(settings: SimulateSettings, plant: Plant, load: Load) -> tuple[Iterator[Request], FollowUp | None]:
    if settings.trace is not None:
        return _trace(settings, plant, load.rate).requests(), None
    assert load.rate is not None
    rates, draw = _rates(settings, load.rate), _draw(settings, plant)
    if settings.workload == "programs":
        programs = Programs(
            rates,
            draw,
            settings.seed,
            settings.mean_calls,
            settings.think_time,
            max_total=plant.config.max_model_len,
            burstiness=settings.burstiness,
        )
        return programs.requests(), programs.after
    return arrivals.independent(rates, draw, settings.seed, settings.burstiness), None


def _rates(settings: SimulateSettings, rate: float) -> Rates:
    match settings.workload:
        case "bursts":
            return arrivals.bursts(rate, settings.burst_factor, settings.burst_seconds, settings.burst_every)
        case "steps":
            return arrivals.steps([(seconds, factor * rate) for seconds, factor in settings.rate_steps()])
        case "diurnal":
            return arrivals.diurnal(rate, settings.swing, settings.period)
        case _:
            return arrivals.constant(rate)


def _draw(settings: SimulateSettings, plant: Plant) -> DrawLengths:
    if settings.trace is not None:
        rows = [(r.prompt_tokens, r.output_tokens) for r in _rows(_trace(settings, plant, None))]
        return lambda rng: _pick(rows, rng)
    longest = plant.config.max_model_len
    if settings.lengths == "fixed":
        return arrivals.fixed_lengths(*arrivals.cut(settings.input_len, settings.output_len, None, longest))
    return arrivals.lengths_of(LENGTHS[settings.lengths], settings.max_input_len, longest)


def _pick(rows: list[tuple[int, int]], rng: random.Random) -> tuple[int, int]:
    return rows[rng.randrange(len(rows))]


def _rows(trace: Trace) -> list[Request]:
    """Raises SettingsError."""
    try:
        rows = list(itertools.islice(trace.requests(), SAMPLED_ROWS))
    except TraceError as error:
        raise SettingsError(f"--trace: {error}") from error
    if not rows:
        raise SettingsError(f"--trace: {trace.path} has no usable request in that window")
    return rows


def _trace(settings: SimulateSettings, plant: Plant, rate: float | None) -> Trace:
    assert settings.trace is not None
    return Trace(
        settings.trace_format,
        settings.trace,
        start_s=settings.trace_start,
        duration_s=settings.trace_seconds or math.inf,
        rate=rate,
        max_input=settings.max_input_len,
        max_total=plant.config.max_model_len,
    )
