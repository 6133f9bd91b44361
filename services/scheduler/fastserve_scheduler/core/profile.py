"""What is known of iteration times before they are run (algorithm of the paper, section 4.1: the job profiler)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times of one (model, dtype, device, stages).

    `prefill`: (prompt tokens, ns) of a whole first iteration through all stages, tokens rising.
    `decode`: (sequences, context tokens of each, ns) of one decode iteration.
    Raises ValueError when the points are empty, unsorted, not positive, or impossible (a prefill that does not
    grow with its length over a factor of eight or more).
    """

    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int, int], ...]
