"""One report of a swap from those of all ranks: a job's KV is moved when every share of it is."""

from fastserve.v1 import stage_pb2


class SwapReports:
    """Of one epoch."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._parts: dict[int, list[stage_pb2.SwapReport]] = {}

    def add(self, part: stage_pb2.SwapReport) -> stage_pb2.SwapReport | None:
        """The whole, once all ranks have reported: their bytes, from the first beginning for as long as the slowest
        took, and the first error there was."""
        parts = self._parts.setdefault(part.swap_id, [])
        parts.append(part)
        if len(parts) < self._num_ranks:
            return None
        del self._parts[part.swap_id]
        return stage_pb2.SwapReport(
            swap_id=part.swap_id,
            epoch=part.epoch,
            stage=part.stage,
            bytes=sum(report.bytes for report in parts),
            copy_ns=max(report.copy_ns for report in parts),
            begin_ns=min(report.begin_ns for report in parts),
            error=next((report.error for report in parts if report.error), ""),
        )
