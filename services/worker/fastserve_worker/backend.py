"""The seam between the service and what computes: the real engine or the fake stage."""

from typing import Protocol

from fastserve_worker.messages import Activations, Plan, ProfilePoint, StageInfo, StageOutput


class StageBackend(Protocol):
    """Everything is called on the stage's own thread, one call at a time, except `info`."""

    @property
    def info(self) -> StageInfo: ...

    def start_epoch(self) -> None:
        """Everything in the KV pool is void: the scheduler will prefill again."""

    def run(self, plan: Plan, activations: Activations | None) -> StageOutput:
        """Compute one iteration. `activations` is None on the first stage.

        Raises any exception when the plan cannot be carried out; the stage stays usable.
        """

    def profile(self, point: ProfilePoint) -> int:
        """Nanoseconds of one iteration of this shape on this stage alone; KV of live jobs is untouched.

        Raises ValueError for a point that can never run.
        """
