"""One accepted job. Mutable; only the core's own parts write to it."""

from dataclasses import dataclass, field

from fastserve_scheduler.core.blocks import BlockTable
from fastserve_scheduler.core.events import JobArrived
from fastserve_scheduler.core.host import HostCopy
from fastserve_scheduler.core.kv_state import KvState

Rank = tuple[int, ...]
"""A place in the order: smaller runs first. The last number is unique; all before it equal means a tie."""

NOT_IN_FLIGHT = -1
NEVER = -1
"""A time that has not come."""


@dataclass(slots=True, eq=False)
class Job:
    job_id: int
    prompt_tokens: int
    max_output_tokens: int
    service_class: str
    priority: int
    #: True output length, or max_output_tokens when nobody knows it. Read by the oracle policy only.
    oracle_output_tokens: int
    arrived_ns: int
    #: Output tokens so far, those of an earlier life included.
    generated: int
    #: A guess of the whole output that came with the request; 0: none did.
    expected_output_tokens: int = 0
    #: The calls of one agent share its name; "": it is alone.
    program: str = ""
    #: Tokens whose KV is computed and not lost, wherever `kv` says it is: positions 0 .. computed-1.
    computed: int = 0
    #: The most `computed` ever was: work below it is done a second time.
    high_water: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    # Written by the tiers alone.
    kv: KvState = KvState.ABSENT
    host: HostCopy = field(default_factory=HostCopy)
    #: Was swapped in and has not run since.
    fresh: bool = False
    #: When ENST promised, on its way out, that it would run next; 0: nobody did.
    promised_ns: int = 0
    #: When its KV came to where it is.
    kv_since_ns: int = 0

    #: Number of the plan it is in.
    seq: int = NOT_IN_FLIGHT
    aborted: bool = False
    #: Came first, found no blocks, and nothing was in flight: draining the pipeline for it is in vain.
    drained: bool = False
    #: Has produced a token here. Until then it is not promoted above the queue it joined.
    started: bool = False
    #: Predicted at its arrival for its first iteration; 0 when that is over.
    first_ns: int = 0
    #: The iteration under way is thrown away at its end (naive MLFQ that cuts overrun first iterations).
    discarding: bool = False
    #: When it was in a batch for the first time, and when it had its first token here.
    first_run_ns: int = NEVER
    first_token_ns: int = NEVER
    #: Tokens of its prefills, those computed again included.
    prefill_tokens: int = 0

    # Written by the order alone.
    joined_level: int = 0
    level: int = 0
    used_ns: int = 0
    place: int = 0
    #: What each guesser expects of its output (`lengths.py`).
    guesses: tuple[int, ...] = ()
    #: What an order that has more than levels ranks by.
    key: int = 0
    #: Has had its first token here, and the order has taken note of it.
    landed: bool = False
    #: Tokens its ticket is still good for, and its place among the tickets.
    turns: int = 0
    ticket_place: int = 0
    #: Starved, and was promoted or given a ticket, and has not run since. Written by the rescue.
    rescued: bool = False
    #: Served before all queues until its next token.
    ticket: bool = False
    rank: Rank = ()
    #: (when it starves, job_id): its place in the deadline index while it is in line.
    deadline: Rank = ()

    # Written by the wait clock alone.
    ran_ns: int = 0
    clock_ns: int = 0

    @classmethod
    def of(cls, event: JobArrived, service_class: str, now_ns: int) -> "Job":
        return cls(
            job_id=event.job_id,
            prompt_tokens=event.prompt_tokens,
            max_output_tokens=event.max_output_tokens,
            service_class=service_class,
            priority=event.priority,
            oracle_output_tokens=event.oracle_output_tokens or event.max_output_tokens,
            expected_output_tokens=event.expected_output_tokens,
            program=event.program,
            arrived_ns=now_ns,
            generated=event.output_tokens,
        )

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far: what the next token depends on."""
        return self.prompt_tokens + self.generated

    @property
    def pending_tokens(self) -> int:
        """Known tokens whose KV is still to be computed; the last of them draws the next token."""
        return self.prompt_tokens + self.generated - self.computed

    @property
    def is_decode(self) -> bool:
        return self.generated > 0 and self.computed == self.prompt_tokens + self.generated - 1

    @property
    def resident(self) -> bool:
        """Its KV is on the device and can be used."""
        return self.kv is KvState.DEVICE

    @property
    def away(self) -> bool:
        """Its KV is on the host or on its way: it can run when that is back."""
        return self.kv is not KvState.DEVICE and self.kv is not KvState.ABSENT

    @property
    def in_flight(self) -> bool:
        return self.seq != NOT_IN_FLIGHT
