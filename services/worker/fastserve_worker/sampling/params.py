"""What one draw needs besides the logits, and what it gives."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


class DrawParams(NamedTuple):
    """How one token is drawn. The result is a function of the logits and of this value only.

    Id lists are packed little-endian uint32. `penalty_prompt` and `penalty_output` are set only when a penalty is on.
    """

    output_position: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = _NO_BIAS
    #: How many of the most likely tokens to report besides the drawn one; None: no log-probabilities at all.
    logprobs: int | None = None
    suppressed: bytes = b""
    penalty_prompt: bytes = b""
    penalty_output: bytes = b""

    @property
    def has_penalty(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts on the logits."""
        return bool(self.logit_bias or self.suppressed) or self.has_penalty


class TokenDraw(NamedTuple):
    """A drawn token; `logprob` is None when none were asked for. `top`: (id, logprob), most likely first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
