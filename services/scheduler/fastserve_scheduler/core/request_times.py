"""Where the time of a request went, told when it ends; the phases are vLLM's, and so are the buckets but the finest.

    arrived ......... first runs ......... first token ......... ended
            queue              prefill                decode
                      `----------- inference ------------'

A pause after the first run (preempted, on the host, computed again) belongs to the phase that it interrupts. A request
that ends early has the phases that it came to: every one that ends has a queue time, those that ran have a prefill and
an inference time, those with a token have a decode time. So the sums of prefill and decode times make the sum of
inference times, and there is one queue time for each request that ended here, in whatever way.
"""

from dataclasses import dataclass, field

from fastserve_scheduler.core.job import NEVER, Job
from fastserve_scheduler.core.tally import Tally, TallySnapshot, in_ns

#: vLLM's begin at 0.3 s, where a prefill and the queue of a scheduler that preempts are long over.
FINE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
TIME_BOUNDS_NS = in_ns(
    *FINE_S, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680
)  # fmt: skip
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


@dataclass(frozen=True, slots=True)
class RequestTimesSnapshot:
    queue: TallySnapshot
    prefill: TallySnapshot
    decode: TallySnapshot
    inference: TallySnapshot
    prefill_tokens: TallySnapshot


def _times() -> Tally:
    return Tally(TIME_BOUNDS_NS)


@dataclass(slots=True)
class RequestTimes:
    queue: Tally = field(default_factory=_times)
    prefill: Tally = field(default_factory=_times)
    decode: Tally = field(default_factory=_times)
    inference: Tally = field(default_factory=_times)
    #: Tokens of a request's prefills, those computed again included.
    prefill_tokens: Tally = field(default_factory=lambda: Tally(TOKEN_BOUNDS))

    def prefills(self, job: Job, num_tokens: int, now_ns: int) -> None:
        """The job is in a batch with `num_tokens` that are no decode; each job's first iteration is of this kind."""
        if job.first_run_ns == NEVER:
            job.first_run_ns = now_ns
        job.prefill_tokens += num_tokens

    def ended(self, job: Job, now_ns: int) -> None:
        """Once per job."""
        ran = job.first_run_ns != NEVER
        self.queue.observe((job.first_run_ns if ran else now_ns) - job.arrived_ns)
        if not ran:
            return
        spoke = job.first_token_ns != NEVER
        self.prefill.observe((job.first_token_ns if spoke else now_ns) - job.first_run_ns)
        if spoke:
            self.decode.observe(now_ns - job.first_token_ns)
        self.inference.observe(now_ns - job.first_run_ns)
        self.prefill_tokens.observe(job.prefill_tokens)

    def snapshot(self) -> RequestTimesSnapshot:
        return RequestTimesSnapshot(
            self.queue.snapshot(),
            self.prefill.snapshot(),
            self.decode.snapshot(),
            self.inference.snapshot(),
            self.prefill_tokens.snapshot(),
        )
