"""Iteration times, measured by the stages themselves and kept between starts (the job profiler of the paper, 4.1).

Every stage times the same points on its own; their sums are the times of the whole pipeline. Each point is run
several times where that is cheap and the fastest run counts: everything that disturbs a measurement makes it longer.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.messages import Measure, Measured, Point, Ready

log = logging.getLogger(__name__)

#: Two replicas may store what they measured at once.
_drafts = itertools.count()

SCHEMA = 1
#: Runs of a point; the first run of all warms the stage up and is not counted.
DECODE_RUNS, PREFILL_RUNS = 3, 1
QUICK_PREFILL = (16, 128, 512)
QUICK_CONTEXT = (16, 512)
FULL_CONTEXT = (16, 256, 1024, 4096)
#: A stage that has not answered an order for so long will not.
MEASURE_TIMEOUT_S = 300.0


class ProfileError(Exception):
    """No profile can be had, and why."""


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is valid for."""

    fingerprint: str
    dtype: str
    device: str
    num_stages: int

    @classmethod
    def of(cls, stages: Sequence[Ready]) -> "ProfileKey":
        first = stages[0]
        devices = ",".join(dict.fromkeys(stage.device for stage in stages))
        return cls(first.fingerprint, first.dtype, devices, len(stages))


@dataclass(frozen=True, slots=True)
class ProfileStore:
    """One JSON file per key. A file that does not fit (other schema, other key, damaged) is as good as none."""

    directory: Path

    def path(self, key: ProfileKey) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()
        return self.directory / f"{digest[:24]}.json"

    def load(self, key: ProfileKey) -> Profile | None:
        path = self.path(key)
        try:
            stored = json.loads(path.read_text())
            if stored["schema"] != SCHEMA or stored["key"] != asdict(key):
                return None
            return profile_from_json(stored["profile"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("stored profile is not usable, measuring again: %s", error, extra={"path": str(path)})
            return None

    def save(self, key: ProfileKey, profile: Profile) -> Path:
        """Raises ProfileError when it cannot be written."""
        path = self.path(key)
        stored = {"schema": SCHEMA, "key": asdict(key), "profile": profile_to_json(profile)}
        draft = path.with_suffix(f".{os.getpid()}-{next(_drafts)}.tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(stored, indent=1) + "\n")
            draft.replace(path)
        except OSError as error:
            raise ProfileError(f"cannot write {path}: {error.strerror}") from error
        return path


def profile_to_json(profile: Profile) -> dict[str, list[list[int]]]:
    return {"prefill": [list(p) for p in profile.prefill], "decode": [list(p) for p in profile.decode]}


def profile_from_json(stored: Mapping[str, list[list[int]]]) -> Profile:
    """Raises ValueError, KeyError or TypeError when `stored` is no profile."""
    prefill = tuple((int(tokens), int(ns)) for tokens, ns in stored["prefill"])
    decode = tuple((int(seqs), int(context), int(ns)) for seqs, context, ns in stored["decode"])
    return Profile(prefill, decode)


def choose_points(stages: Sequence[Ready], max_batch_size: int, *, full: bool) -> tuple[Point, ...]:
    """What to measure, repetitions included, within what the stages can hold. The first point is the warm-up."""
    pool_tokens = min(stage.num_blocks for stage in stages) * stages[0].block_size
    longest = min(stages[0].max_model_len, pool_tokens) - 1
    lengths = _doubling(16, longest) if full else _within(QUICK_PREFILL, longest)
    contexts = _within(FULL_CONTEXT if full else QUICK_CONTEXT, longest)
    batches = _doubling(1, max_batch_size) if full else tuple(dict.fromkeys((1, max_batch_size)))
    prefill = [Point(1, tokens, 0) for tokens in lengths]
    decode = [Point(n, 1, c) for n in batches for c in contexts if n == 1 or n * (c + 1) <= pool_tokens]
    return (prefill[0], *prefill * PREFILL_RUNS, *decode * DECODE_RUNS)


def _within(values: Sequence[int], longest: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(value, max(longest, 1)) for value in values))


def _doubling(first: int, last: int) -> tuple[int, ...]:
    values = [min(first, max(last, 1))]
    while values[-1] * 2 < last:
        values.append(values[-1] * 2)
    return tuple(dict.fromkeys((*values, max(last, 1))))


def build_profile(points: Sequence[Point], times_ns: Mapping[int, Sequence[int]]) -> Profile:
    """`times_ns`: stage -> one time per point. Raises ProfileError when they are no possible profile."""
    prefill, decode = _sums(points, times_ns)
    try:
        return Profile(prefill, decode)
    except ValueError as error:
        raise ProfileError(str(error)) from error


def flat_profile(points: Sequence[Point], times_ns: Mapping[int, Sequence[int]]) -> Profile:
    """Every prompt costs what the slowest one cost. Raises ProfileError."""
    prefill, decode = _sums(points, times_ns)
    longest = prefill[-1][0], max(ns for _, ns in prefill)
    try:
        return Profile((longest,), decode)
    except ValueError as error:
        raise ProfileError(str(error)) from error


def _sums(
    points: Sequence[Point], times_ns: Mapping[int, Sequence[int]]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
    """Prefill and decode points with the time of all stages, the fastest run of each; the warm-up is left out."""
    fastest: dict[Point, int] = {}
    for index, point in enumerate(points[1:], 1):
        total_ns = sum(times[index] for times in times_ns.values())
        fastest[point] = min(total_ns, fastest.get(point, total_ns))
    prefill = sorted((p.new_tokens, ns) for p, ns in fastest.items() if p.context_tokens == 0)
    decode = sorted((p.num_sequences, p.context_tokens, ns) for p, ns in fastest.items() if p.context_tokens)
    return tuple(prefill), tuple(decode)


class Profiler:
    """Finds a profile for the joined stages: stored, or measured now and stored."""

    def __init__(
        self, store: ProfileStore, send: Callable[[Measure], None], max_batch_size: int, *, full: bool = False
    ) -> None:
        self._store, self._send, self._max_batch_size, self._full = store, send, max_batch_size, full
        self._order: Measure | None = None
        self._times_ns: dict[int, tuple[int, ...]] = {}
        self._complete = asyncio.Event()
        self._num_stages = 0
        self._last_id = 0

    async def obtain(self, stages: Sequence[Ready], epoch: int) -> Profile:
        """The stored profile, unless a full one is asked for; else measure and store. Raises ProfileError.

        Times that do not grow with the prompt are measured again over a wider range. If they still do not, the
        device is wider than any prompt: the profile is flat, and is not stored, as launches alone would look so too.
        """
        key = ProfileKey.of(stages)
        stored = None if self._full else await asyncio.to_thread(self._store.load, key)
        if stored is not None:
            return stored
        points, times_ns = await self._measure(stages, epoch, full=self._full)
        try:
            profile = build_profile(points, times_ns)
        except ProfileError as error:
            if self._full:
                raise
            log.warning("%s; measuring again over a wider range", error)
            points, times_ns = await self._measure(stages, epoch, full=True)
            try:
                profile = build_profile(points, times_ns)
            except ProfileError as again:
                log.warning("%s; every prompt is taken to cost as much as the longest", again)
                return flat_profile(points, times_ns)
        path = await asyncio.to_thread(self._store.save, key, profile)
        log.info("measured a profile", extra={"path": str(path)})
        return profile

    async def _measure(
        self, stages: Sequence[Ready], epoch: int, *, full: bool
    ) -> tuple[tuple[Point, ...], dict[int, tuple[int, ...]]]:
        """Points and what each stage took for them."""
        points = choose_points(stages, self._max_batch_size, full=full)
        self._last_id += 1
        self._order = Measure(self._last_id, epoch, points)
        self._num_stages = len(stages)
        self._times_ns = {}
        self._complete.clear()
        self._send(self._order)
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                await self._complete.wait()
        except TimeoutError as error:
            silent = sorted(set(range(self._num_stages)) - set(self._times_ns))
            raise ProfileError(f"stages {silent} did not answer a profile order") from error
        finally:
            self._order = None
        return points, self._times_ns

    def on_measured(self, stage: int, answer: Measured) -> None:
        """A stage's answer; those to other orders are dropped."""
        order = self._order
        if order is None or answer.profile_id != order.profile_id:
            return
        if len(answer.compute_ns) != len(order.points):
            log.error("a stage timed %d of %d points", len(answer.compute_ns), len(order.points))
            return
        self._times_ns[stage] = answer.compute_ns
        if len(self._times_ns) == self._num_stages:
            self._complete.set()

    def path_for(self, stages: Sequence[Ready]) -> Path:
        return self._store.path(ProfileKey.of(stages))
