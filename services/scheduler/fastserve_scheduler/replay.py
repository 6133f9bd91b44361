"""`python -m fastserve_scheduler.replay JOURNAL [JOB]`: run a journal through the core of this version.

Exit status: 0 when every command is the same, 1 at the first difference, 2 when the file cannot be replayed. With a
job's number its story is told as well.
"""

import json
import sys
from pathlib import Path

from fastserve_scheduler.core.invariants import InvariantViolation
from fastserve_scheduler.journal import Divergence, JournalError, encode_event, replay

EXIT_DIFFERS, EXIT_USAGE = 1, 2


def _describe(divergence: Divergence) -> str:
    entry = divergence.entry
    lines = [
        f"event {divergence.number} at {entry.now_ns} ns is answered differently:",
        f"  event     {json.dumps(encode_event(entry.event))}",
        f"  recorded  {json.dumps(entry.commands)}",
        f"  replayed  {json.dumps(divergence.replayed)}",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2 or not all(job.isdecimal() for job in argv[1:]):
        sys.stderr.write(f"{(__doc__ or '').strip()}\n")
        return EXIT_USAGE
    try:
        result = replay(Path(argv[0]), check=True)
    except JournalError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except InvariantViolation as error:
        sys.stderr.write(f"the core contradicts itself: {error}\n")
        return EXIT_DIFFERS
    for job in argv[1:]:
        sys.stdout.writelines(f"{moment}\n" for moment in result.core.story(int(job)))
    if result.divergence is not None:
        sys.stdout.write(f"{_describe(result.divergence)}\n")
        return EXIT_DIFFERS
    sys.stdout.write(f"{result.num_events} events, the same commands\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
