"""One simulated run as data, and the system and the requests it stands for.

OPT-13B on one A100 by DistServe's fitted iteration times unless `kv_heads` says otherwise, 16 jobs a batch, prompts run
whole, ShareGPT-like lengths, KV memory that is never short: the set-up in which policies are compared everywhere here.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import islice
from pathlib import Path

from fastserve_common.load.traces import read_rows
from fastserve_scheduler.core import CoreConfig, MlfqConfig
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.sim.arrivals import Request, at_once, constant, cut, independent, steps
from fastserve_scheduler.sim.callers import Callers
from fastserve_scheduler.sim.capacity import capacity
from fastserve_scheduler.sim.cost import OPT_13B_A100, LinearCost, LinkCost
from fastserve_scheduler.sim.devices import DEVICES
from fastserve_scheduler.sim.fleet import Plant
from fastserve_scheduler.sim.models import MODELS
from fastserve_scheduler.sim.roofline import RooflineCost
from fastserve_scheduler.sim.study import LINK_LATENCY_NS

from .shared import MAX_TOTAL, lengths

BLOCK_TOKENS = 16
TOKEN_BYTES = 2 * 40 * 5120 * 2
"""KV of one token of OPT-13B in fp16."""

AMPLE_TOKENS = 1 << 21
A100_40_TOKENS = 14_900
"""What OPT-13B leaves of 40 GB."""

CAPACITY_SEED = 99

NEVER_S = float(1 << 30)
"""An alpha that nobody reaches."""

TRACES = {"azure-code": "AzureLLMInferenceTrace_code.csv.gz", "azure-conv": "AzureLLMInferenceTrace_conv.csv.gz"}
TRACE_LONGEST_PROMPT, TRACE_MAX_TOTAL = 2048, 3072


@dataclass(frozen=True, slots=True)
class Case:
    """`rate` 0: everybody at once, to measure capacity. `share`: of measured capacity, in place of a rate. `pattern`:
    (seconds, job/s) one after the other instead of a rate, the last one until `jobs` have come. `window`: leave out the
    first 15 and the last 10 % of the jobs.

    `hint_error`: deviation of ln(hint / truth) of the callers' hints; None: they send none. `prefill_factor`,
    `decode_factor`: of the profile that the scheduler is given over the truth; the first quantum is the profile's
    shortest decode. `profile_noise`: each prefill point is off by a random factor up to this, either way.
    `kv_heads` > 0: Llama-3-8B's shape with so many KV heads on an A100-40, its KV in what the weights leave.
    `swap_compute` > 0: speed of the link such that moving the KV of a mean running job one way takes so many decode
    iterations of a full batch; 0: 25 GB/s. `watch`: count jobs that run above their own queue. `limits`: callers name
    the true length of the answer as its limit; else they ask for all there is room for.
    """

    policy: str = "skip-join-mlfq"
    load: str = "sharegpt"
    rate: float = 0.0
    share: float = 0.0
    pattern: tuple[tuple[float, float], ...] = ()
    seed: int = 1
    jobs: int = 400
    window: bool = False
    alpha_s: float = 10.0
    promotion: str = "reset"
    overrun: str = "finish"
    ratio: int = 2
    levels: int = 0
    batch: int = 16
    chunk: int = 0
    kv: str = "proactive"
    kv_ranking: str = "order"
    kv_tokens: int = AMPLE_TOKENS
    host_tokens: int = 1 << 20
    swap_compute: float = 0.0
    hint_error: float | None = None
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    profile_noise: float = 1.0
    kv_heads: int = 0
    watch: bool = False
    limits: bool = False

    def key(self) -> str:
        """What differs from the defaults, so that a new field leaves old keys as they are."""
        mine = asdict(self)
        return json.dumps({each.name: mine[each.name] for each in fields(self) if mine[each.name] != each.default})


def plant_of(case: Case) -> Plant:
    """Nobody is refused because many wait."""
    longest = longest_of(case)
    config = CoreConfig(
        num_stages=1,
        block_size=BLOCK_TOKENS,
        max_batch_size=case.batch,
        max_batch_tokens=max(4096, case.batch),
        max_model_len=longest,
        prefill_chunk_tokens=case.chunk,
        max_waiting_jobs=1 << 20,
        max_waiting_tokens=1 << 40,
        policy=case.policy,
        mlfq=_mlfq(case),
        kv_policy=case.kv,
        kv_ranking="enst" if case.kv_ranking == "enst" else "order",
    )
    cost, token_bytes, kv_tokens = _device(case)
    block_bytes = BLOCK_TOKENS * token_bytes
    profile = cost.profile(longest, case.batch)
    return Plant(
        config=replace(config, kv_block_bytes=block_bytes),
        profile=_told(profile, case),
        cost=cost,
        num_blocks=kv_tokens // BLOCK_TOKENS,
        host_slots=case.host_tokens // BLOCK_TOKENS,
        link=LinkCost(block_bytes, link_bytes_per_s(case.swap_compute), LINK_LATENCY_NS),
    )


def with_rate(case: Case) -> Case:
    """A rate in place of a share. Raises ValueError for a trace, which has no lengths to draw from."""
    if not case.share:
        return case
    if case.load in TRACES:
        raise ValueError(f"{case.load} is played at a rate, not at a share of capacity")
    return replace(
        case, share=0.0, rate=case.share * _capacity(case.load, case.batch, case.chunk, case.kv_tokens, case.kv_heads)
    )


@cache
def _capacity(load: str, batch: int, chunk: int, kv_tokens: int, kv_heads: int) -> float:
    """Jobs per second, of whatever decides it, under first come, first served."""
    case = Case(policy="fcfs", load=load, batch=batch, chunk=chunk, kv_tokens=kv_tokens, kv_heads=kv_heads)
    return capacity(plant_of(case), lengths(load), seed=CAPACITY_SEED)


def _mlfq(case: Case) -> MlfqConfig:
    return MlfqConfig(
        ratio=case.ratio,
        num_levels=case.levels,
        alpha_ns=round(case.alpha_s * 1e9),
        promotion="return" if case.promotion == "return" else "reset",
        overrun="abort" if case.overrun == "abort" else "finish",
    )


def _device(case: Case) -> tuple[RooflineCost | LinearCost, int, int]:
    """Iteration times, bytes of KV per token, tokens of KV on the device."""
    if not case.kv_heads:
        return OPT_13B_A100, TOKEN_BYTES, case.kv_tokens
    cost = RooflineCost(replace(MODELS["llama-3-8b"], num_kv_heads=case.kv_heads), DEVICES["a100-40"])
    return cost, cost.kv_bytes_per_token, cost.free_kv_bytes() // cost.kv_bytes_per_token


MEAN_RUNNING_TOKENS = 288
"""KV of a job in the middle of ShareGPT's mean answer: 118 tokens of prompt and half of 340."""

FULL_DECODE_S = (19_900_000 + 16 * (38_500 + 627 * MEAN_RUNNING_TOKENS)) / 1e9
"""One decode iteration of 16 of them."""


def link_bytes_per_s(swap_compute: float) -> int:
    """Each direction."""
    if not swap_compute:
        return 25_000_000_000
    return round(MEAN_RUNNING_TOKENS * TOKEN_BYTES / (swap_compute * FULL_DECODE_S))


def _told(profile: Profile, case: Case) -> Profile:
    """The profile with its errors."""
    rng = random.Random(f"{case.seed}:profile")
    wrong = [case.prefill_factor * case.profile_noise ** rng.uniform(-1, 1) for _ in profile.prefill]
    return Profile(
        tuple((tokens, round(ns * factor)) for (tokens, ns), factor in zip(profile.prefill, wrong, strict=True)),
        tuple((batch, context, round(ns * case.decode_factor)) for batch, context, ns in profile.decode),
    )


def requests_of(case: Case, traces: Path | None) -> list[Request]:
    """As the callers send them. Raises ValueError when a trace is asked for and there is no folder."""
    callers = Callers(case.seed, None if case.limits else longest_of(case), case.hint_error)
    return [callers.says(request) for request in _arrivals(case, traces)]


def longest_of(case: Case) -> int:
    """Prompt and answer together."""
    return TRACE_MAX_TOTAL if case.load in TRACES else MAX_TOTAL


def _arrivals(case: Case, traces: Path | None) -> Iterator[Request]:
    if case.load in TRACES:
        return iter(_window(case, traces))
    draw = lengths(case.load)
    if case.pattern:
        return islice(independent(steps(case.pattern), draw, case.seed), case.jobs)
    if not case.rate:
        return at_once(case.jobs, draw, case.seed)
    return islice(independent(constant(case.rate), draw, case.seed), case.jobs)


@cache
def _rows(path: Path) -> list[tuple[float, int, int]]:
    return [(row.time_s, row.input_tokens, row.output_tokens) for row in read_rows("azure", path)]


def _window(case: Case, traces: Path | None) -> list[Request]:
    """A random window of the trace, its time stretched to the rate; rate 0: all at once."""
    if traces is None:
        raise ValueError(f"{case.load} needs --traces, the folder with {TRACES[case.load]}")
    rows = _rows(traces / TRACES[case.load])
    begin = random.Random(case.seed).randrange(len(rows) - case.jobs)
    window = rows[begin : begin + case.jobs]
    first_s = window[0][0]
    factor = case.jobs / case.rate / (window[-1][0] - first_s) if case.rate else 0.0
    return [
        Request(round((at_s - first_s) * factor * 1e9), *cut(num_in, num_out, TRACE_LONGEST_PROMPT, TRACE_MAX_TOTAL))
        for at_s, num_in, num_out in window
    ]
