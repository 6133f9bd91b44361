"""`fastserve replay FILE`: a scheduler's journal through this version of the core. It is the scheduler's own module."""

from collections.abc import Sequence

from fastserve.cli.foreground import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("fastserve_scheduler.replay", argv)
