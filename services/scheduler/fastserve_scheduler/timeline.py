"""What each stage computed and copied, and when: a ring of spans, and the Chrome trace made of it.

Stages stamp by the monotonic clock of their node. Clocks of nodes have nothing to do with each other, so each stage's
spans are moved by the smallest difference seen between hearing of a span and its end, per epoch: then none ends after
it was heard of, and what is left of the error is the fastest message's way. Load the file in Perfetto or chrome://tracing.
"""

import json
import logging
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from fastserve_scheduler.core.commands import SwapDirection

log = logging.getLogger(__name__)

Event: TypeAlias = "dict[str, str | int | float | dict[str, str | int]]"
"""One event of the trace format."""

_NS_PER_US = 1000


class Lane(StrEnum):
    COMPUTE = "compute"
    #: Before an iteration, for copies that it needed.
    WAIT = "wait for copies"
    OUT = "copy out"
    IN = "copy in"


#: Rows of a stage. It waits on the thread that computes, so those two share one.
_ROWS = {Lane.COMPUTE: 1, Lane.WAIT: 1, Lane.OUT: 2, Lane.IN: 3}
_LANES = {SwapDirection.OUT: Lane.OUT, SwapDirection.IN: Lane.IN}


@dataclass(frozen=True, slots=True)
class Span:
    """`number`: of the plan or the swap. Times are the stage's."""

    stage: int
    epoch: int
    lane: Lane
    begin_ns: int
    end_ns: int
    number: int
    num_bytes: int = 0


class Timeline:
    """The last `max_spans` spans. `path`: where `close` puts the trace."""

    def __init__(self, path: Path, max_spans: int) -> None:
        self._path = path
        self._spans: deque[Span] = deque(maxlen=max_spans)
        #: By (stage, epoch): what is added to its times.
        self._shift_ns: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def computed(
        self, stage: int, epoch: int, seq: int, begin_ns: int, compute_ns: int, wait_ns: int, heard_ns: int
    ) -> None:
        """An iteration. `begin_ns` 0: the stage did not say."""
        if begin_ns == 0:
            return
        if wait_ns:
            self._add(Span(stage, epoch, Lane.WAIT, begin_ns - wait_ns, begin_ns, seq), heard_ns)
        self._add(Span(stage, epoch, Lane.COMPUTE, begin_ns, begin_ns + compute_ns, seq), heard_ns)

    def copied(
        self,
        stage: int,
        epoch: int,
        direction: SwapDirection,
        swap_id: int,
        begin_ns: int,
        copy_ns: int,
        num_bytes: int,
        heard_ns: int,
    ) -> None:
        """A copy that landed. `begin_ns` 0: it never began, or the stage did not say."""
        if begin_ns:
            span = Span(stage, epoch, _LANES[direction], begin_ns, begin_ns + copy_ns, swap_id, num_bytes)
            self._add(span, heard_ns)

    def _add(self, span: Span, heard_ns: int) -> None:
        key, shift_ns = (span.stage, span.epoch), heard_ns - span.end_ns
        self._shift_ns[key] = min(self._shift_ns.get(key, shift_ns), shift_ns)
        self._spans.append(span)

    def trace(self) -> dict[str, list[Event] | str]:
        """In the Chrome trace format: a process per stage, its rows as threads; microseconds from the first span on."""
        shifted = [(span.begin_ns + self._shift_ns[span.stage, span.epoch], span) for span in self._spans]
        shifted.sort(key=itemgetter(0))
        origin_ns = shifted[0][0] if shifted else 0
        events: list[Event] = []
        for stage in sorted({span.stage for span in self._spans}):
            events += _headings(stage)
        events += [_event(span, begin_ns - origin_ns) for begin_ns, span in shifted]
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def close(self) -> None:
        try:
            self._path.write_text(json.dumps(self.trace()) + "\n")
        except OSError as error:
            log.error("the timeline is lost: %s", error)
        else:
            log.info("timeline written", extra={"path": str(self._path), "spans": len(self._spans)})


def _headings(stage: int) -> list[Event]:
    names = {1: "compute", 2: "copy out", 3: "copy in"}
    process: Event = {"name": "process_name", "ph": "M", "pid": stage, "tid": 0, "args": {"name": f"stage {stage}"}}
    rows: list[Event] = [
        {"name": "thread_name", "ph": "M", "pid": stage, "tid": row, "args": {"name": name}}
        for row, name in names.items()
    ]
    return [process, *rows]


def _event(span: Span, begin_ns: int) -> Event:
    copying = span.lane in (Lane.OUT, Lane.IN)
    args: dict[str, str | int] = {"swap": span.number, "bytes": span.num_bytes} if copying else {"plan": span.number}
    return {
        "name": span.lane.value,
        "cat": "copy" if copying else "compute",
        "ph": "X",
        "ts": begin_ns / _NS_PER_US,
        "dur": (span.end_ns - span.begin_ns) / _NS_PER_US,
        "pid": span.stage,
        "tid": _ROWS[span.lane],
        "args": args,
    }
