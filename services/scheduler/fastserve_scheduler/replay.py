"""`fastserve replay JOURNAL [--story JOB]`: run a journal through the core of this version.

Exit status: 0 when every command is the same, 1 at the first difference, 2 when the file cannot be replayed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fastserve_scheduler.core.invariants import InvariantViolation
from fastserve_scheduler.journal_codec import encode_event
from fastserve_scheduler.journal_reader import Divergence, JournalError, replay

EXIT_DIFFERS, EXIT_USAGE = 1, 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"fastserve: {message}\n")


def _describe(divergence: Divergence) -> str:
    entry = divergence.entry
    lines = [
        f"event {divergence.number} at {entry.now_ns} ns is answered differently:",
        f"  event     {json.dumps(encode_event(entry.event))}",
        f"  recorded  {json.dumps(entry.commands)}",
        f"  replayed  {json.dumps(divergence.replayed)}",
    ]
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="fastserve replay",
        description="Feed a journal's events to this version's core and compare its commands, byte for byte.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "journal",
        type=Path,
        metavar="FILE",
        help="what `--journal FILE` of the scheduler wrote, with the FILE.N beside it",
    )
    parser.add_argument(
        "--story",
        type=int,
        action="append",
        default=[],
        metavar="JOB",
        help="tell what happened to this job; repeatable",
    )
    parser.add_argument("--no-check", action="store_true", help="do not prove the core's invariants: faster")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    try:
        result = replay(args.journal, check=not args.no_check)
    except JournalError as error:
        sys.stderr.write(f"fastserve: {error}\n")
        return EXIT_USAGE
    except InvariantViolation as error:
        sys.stderr.write(f"fastserve: the core contradicts itself: {error}\n")
        return EXIT_DIFFERS
    for job in args.story:
        moments = result.core.story(job)
        if not moments:
            sys.stderr.write(f"fastserve: --story: nothing is remembered of job {job}\n")
        sys.stdout.writelines(f"{moment}\n" for moment in moments)
    if result.divergence is not None:
        sys.stdout.write(f"{_describe(result.divergence)}\n")
        return EXIT_DIFFERS
    since = "" if result.since_ns is None else f" since {result.since_ns} ns; what was before is not kept"
    sys.stdout.write(f"{result.num_events} events, the same commands{since}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
