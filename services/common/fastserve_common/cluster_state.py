"""What several pipelines or schedulers say of themselves, added up for people."""

from collections.abc import Sequence

from fastserve.v1 import scheduler_pb2

#: Of several the longest is told; everything else that is counted is added up.
_LARGEST = frozenset({"longest_wait_ms"})


def sum_states(parts: Sequence[scheduler_pb2.GetStateResponse]) -> scheduler_pb2.GetStateResponse:
    """At least one; the sum holds the parts too. One alone is itself."""
    if len(parts) == 1:
        return parts[0]
    whole = scheduler_pb2.GetStateResponse(policy=parts[0].policy)
    for part in parts:
        for field, value in part.ListFields():
            if isinstance(value, int):
                known = getattr(whole, field.name)
                setattr(whole, field.name, max(known, value) if field.name in _LARGEST else known + value)
        whole.stages.extend(part.stages)
        for level in part.levels:
            if level.level == len(whole.levels):
                whole.levels.add(level=level.level, quantum_ns=level.quantum_ns)
            whole.levels[level.level].waiting += level.waiting
            whole.levels[level.level].running += level.running
    whole.replicas.extend(parts)
    return whole
