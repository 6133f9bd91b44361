"""Iteration times expected from the profile, corrected by what was seen. Wrong predictions cost order, never safety."""

from fastserve_scheduler.core.profile import Profile

ONE = 1024
"""The correction is a ratio in 1/1024, so that it stays an integer."""

MAX_CORRECTION = 8
"""The correction stays within 1/8 .. 8: beyond that the profile is of another machine and wants measuring again."""

WEIGHT = 16
"""One observation moves the correction by 1/16 of the way."""


class Predictor:
    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.correction = ONE

    def update(self, profile: Profile) -> None:
        """A fresh profile needs no old correction."""
        self.profile, self.correction = profile, ONE

    def first_iteration_ns(self, tokens: int) -> int:
        """t_init: expected time of a first iteration over `tokens` tokens."""
        return self.profile.prefill_ns(tokens) * self.correction // ONE

    def observe(self, prompt_tokens: int, decodes: int, context_tokens: int, compute_ns: int) -> None:
        """Learn from an iteration that ran `prompt_tokens` and `decodes` jobs with `context_tokens` in all.

        Only iterations made mostly of prompts tell something about prompts.
        """
        if prompt_tokens == 0 or compute_ns <= 0:
            return
        prefill_ns = self.profile.prefill_ns(prompt_tokens)
        # Both points of the profile hold the fixed cost of an iteration once; count it once.
        decode_ns = 0
        if decodes:
            decode_ns = self.profile.decode_ns(decodes, context_tokens // decodes) - self.profile.min_decode_ns
        if decode_ns > prefill_ns:
            return
        ratio = compute_ns * ONE // (prefill_ns + decode_ns)
        ratio = min(max(ratio, ONE // MAX_CORRECTION), ONE * MAX_CORRECTION)
        self.correction = (self.correction * (WEIGHT - 1) + ratio) // WEIGHT
