"""Points of the figures: what is simulated, what is kept of it, and a file in which they add up over many calls.

Figures share points: one that is in the file is not simulated again, whichever figure asked for it first.
"""

import gc
import json
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from fastserve_scheduler.sim.arrivals import Request
from fastserve_scheduler.sim.capacity import DRAWN, served_of
from fastserve_scheduler.sim.fleet import Fleet, Outcome
from fastserve_scheduler.sim.recorder import Finished
from fastserve_scheduler.sim.report import Setup, in_window, to_result

from .loads import lengths, requests, without_limits
from .systems import build

DROP_FIRST, DROP_LAST = 0.15, 0.10
"""Of the jobs of a long run: filling up and running empty."""

GOODPUT_FACTORS = (5, 10, 20)

KEPT = (
    "mean_normalised_latency", "p95_normalised_latency", "p99_normalised_latency", "mean_ttft_ms", "p95_ttft_ms",
    "mean_tpot_ms", "p95_tpot_ms", "mean_e2el_ms", "p99_e2el_ms", "request_throughput", "completed", "queueing_share",
    "executing_share", "swap_blocked_share", "longest_wait_ms", "p99_itl_ms", "iterations", "swapped_out_bytes",
    "swapped_in_bytes", "recomputed_share", "peak_kv_tokens", "enst_error_mean_s", "length_class_fairness",
    "quartile_fairness", "normalised_latency_by_quartile",
)  # fmt: skip
"""Of a result of the simulator."""

UNTOLD = ("predicted",)
"""Orders that would take a caller's limit for the length of the answer, which it is in these loads."""

Measured = dict[str, object]


@dataclass(frozen=True, slots=True)
class Point:
    """`system`, `order`, `load`: names in systems.py and loads.py. `rate` 0: all jobs at once, to measure capacity.

    `window`: leave the first and last jobs out, as a long run does.
    """

    system: str
    order: str
    load: str
    rate: float
    seed: int
    jobs: int = 400
    batch: int = 16
    kv: str = "proactive"
    chunk: int = 0
    window: bool = False

    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def measure(point: Point) -> Measured:
    """Simulate it; JSON-ready."""
    plant = build(point.system, point.order, batch=point.batch, kv=point.kv, chunk=point.chunk)
    arrivals = list(requests(point.load, point.rate, point.jobs, point.seed))
    if point.order in UNTOLD:
        arrivals = list(without_limits(arrivals, plant.config.max_model_len))
    gc.disable()  # a run makes no cycles worth looking for, and looking takes a tenth of its time
    outcome = Fleet(plant).run(arrivals)
    gc.enable()
    drop_first, drop_last = (DROP_FIRST, DROP_LAST) if point.window else (0.0, 0.0)
    setup = Setup(point.system, point.rate, drop_first=drop_first, drop_last=drop_last)
    result = to_result(setup, outcome)
    kept: Measured = {name: result[name] for name in KEPT}
    if not point.rate:
        draw, rng = lengths(point.load), random.Random(0)
        kept["capacity"] = served_of(plant, outcome.recorder.finished, (draw(rng) for _ in range(DRAWN)))
    kept["attainment"] = attainment(outcome, arrivals, in_window(outcome, drop_first, drop_last))
    return kept


def attainment(outcome: Outcome, arrivals: Sequence[Request], finished: Finished) -> dict[str, float]:
    """Share of jobs whose first token and whose later tokens take no longer than 5, 10, 20 times what they take, on
    average, in an empty system."""
    profile = outcome.plant.profile
    first_s = sum(profile.prefill_ns(request.prompt_tokens) for request in arrivals) / len(arrivals) / 1e9
    token_s = profile.min_decode_ns / 1e9
    rows = list(zip(finished.first_s(), finished.token_gap_s(), strict=True))
    return {
        str(factor): sum(first <= factor * first_s and gap <= factor * token_s for first, gap in rows) / len(rows)
        for factor in GOODPUT_FACTORS
    }


class Store:
    """Measured points in a file of JSON lines, appended one by one; several commands may add to it at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._rows: dict[str, Measured] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what others have added."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._read_bytes += len(line)
                row = json.loads(line)
                self._rows[row.pop("point")] = row

    def __contains__(self, point: Point) -> bool:
        return point.key() in self._rows

    def add(self, point: Point, measured: Measured) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"point": point.key(), **measured}) + "\n")
        self.refresh()

    def number(self, point: Point, *path: str) -> float:
        """One number of a measured point. Raises KeyError when it has not been measured."""
        value: object = self._rows[point.key()]
        for name in path:
            assert isinstance(value, dict)
            value = value[name]
        assert isinstance(value, int | float)
        return float(value)

    def numbers(self, point: Point, *path: str) -> list[float]:
        """A list of a measured point."""
        value: object = self._rows[point.key()]
        for name in path:
            assert isinstance(value, dict)
            value = value[name]
        assert isinstance(value, list)
        return [float(each) for each in value]


def run_all(points: Iterable[Point], store: Store, *, processes: int, seconds: float) -> int:
    """Measure what is missing; start nothing after `seconds`. Returns how many are missing still."""
    missing = list(dict.fromkeys(point for point in points if point not in store))
    if not missing:
        return 0
    until_s = time.monotonic() + seconds
    if processes == 1:
        for point in missing:
            if time.monotonic() > until_s:
                break
            store.refresh()
            if point not in store:
                store.add(point, measure(point))
        return sum(point not in store for point in missing)
    return _in_processes(missing, store, processes, until_s)


def _in_processes(missing: Sequence[Point], store: Store, processes: int, until_s: float) -> int:
    waiting = list(reversed(missing))
    running: dict[Future[Measured], Point] = {}
    with ProcessPoolExecutor(processes) as pool:
        while waiting or running:
            while waiting and len(running) < processes and time.monotonic() <= until_s:
                point = waiting.pop()
                running[pool.submit(measure, point)] = point
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                store.add(running.pop(done), done.result())
    return len(waiting)
