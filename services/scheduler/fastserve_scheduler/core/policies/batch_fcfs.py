"""First come, first served, a batch at a time: what FasterTransformer does. Nobody joins a batch that has begun."""

from fastserve_scheduler.core.policies.fcfs import Fcfs


class BatchFcfs(Fcfs):
    whole_batches = True
