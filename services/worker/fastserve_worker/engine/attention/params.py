"""What one layer's attention does with its scores."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Constants of one layer."""

    scale: float
    #: A token sees itself and the window - 1 tokens before it; None: all before it.
    window: int | None = None
    #: Scores become softcap * tanh(score / softcap); None: unchanged.
    softcap: float | None = None
