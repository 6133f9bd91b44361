"""What a pipeline is, whichever processes its stages are."""

from dataclasses import dataclass

from fastserve_scheduler.messages import Ready


@dataclass(frozen=True, slots=True)
class Identity:
    """What the core was built for. Stages that come back must be the same."""

    fingerprint: str
    block_size: int
    max_model_len: int

    @classmethod
    def of(cls, ready: Ready) -> "Identity":
        return cls(ready.fingerprint, ready.block_size, ready.max_model_len)
