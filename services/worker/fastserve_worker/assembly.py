"""Hidden states that arrive in chunks, put together again. Pure: no I/O, no event loop."""

from fastserve_worker.errors import PlanError
from fastserve_worker.messages import ActivationPart, Activations, Plan, StageInfo


class ActivationAssembly:
    """Collects the activations of one plan. What does not fit the plan exactly is refused, never guessed."""

    def __init__(self, plan: Plan, info: StageInfo) -> None:
        self.plan = plan
        self._dtype = info.hidden_dtype
        self._shape = (plan.num_tokens, info.hidden_size)
        #: Bytes of the whole, known from the plan before the first chunk is here.
        self.num_bytes = info.activation_bytes(plan.num_tokens)
        self._buffer: bytearray | None = None
        self._received = 0

    def add(self, part: ActivationPart) -> Activations | None:
        """The whole once `part` completes it. Raises PlanError when `part` is not the next piece of it."""
        if part.seq != self.plan.seq:
            raise PlanError(f"activations of plan {part.seq} came while those of plan {self.plan.seq} were due")
        if part.dtype != self._dtype or part.shape != self._shape:
            raise PlanError(
                f"plan {self.plan.seq}: activations are {part.dtype} {part.shape}, "
                f"this stage expects {self._dtype} {self._shape}"
            )
        end = part.offset + len(part.data)
        if part.offset != self._received or end > self.num_bytes or (not part.data and self.num_bytes):
            raise PlanError(
                f"plan {self.plan.seq}: activation bytes {part.offset} to {end} of {self.num_bytes} "
                f"came after {self._received} bytes"
            )
        if self._buffer is None:
            self._buffer = bytearray(self.num_bytes)
        self._buffer[part.offset : end] = part.data
        self._received = end
        if self._received < self.num_bytes:
            return None
        return Activations(self._dtype, self._shape, self._buffer, part.compute_ns)
