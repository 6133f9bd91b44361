"""How long each job has not run: the starvation deadlines.

Within a service class alpha is the same for all, so the order of clocks is the order of deadlines, and a look at the
first job of each class is enough. A clock starts at arrival and starts again when the job ran or was promoted. Jobs in
flight and jobs that hold a ticket wait for no promotion and are not on the clock.
"""

from collections import OrderedDict

from fastserve_scheduler.core.job import Job


class WaitClock:
    def __init__(self, default_alpha_ns: int, service_classes: tuple[tuple[str, int], ...]) -> None:
        self._alpha_ns = {"": default_alpha_ns, **dict(service_classes)}
        self._clocks: dict[str, OrderedDict[int, Job]] = {name: OrderedDict() for name in self._alpha_ns}
        self._pending: OrderedDict[int, Job] = OrderedDict()
        #: No alpha is shorter than this: what the backlog makes of it.
        self.least_alpha_ns = 0

    def set_alpha(self, default_alpha_ns: int) -> None:
        """For the jobs that name no class. Who has waited so long already starves at once."""
        self._alpha_ns[""] = default_alpha_ns

    def alpha_ns(self, service_class: str) -> int:
        return max(self._alpha_ns.get(service_class, self._alpha_ns[""]), self.least_alpha_ns)

    def deadline_ns(self, job: Job) -> int:
        """When the job starves; a job with a ticket does already."""
        return 0 if job.ticket else job.clock_ns + self.alpha_ns(job.service_class)

    def waits(self, job: Job) -> bool:
        return self._pending.get(job.job_id) is job

    def class_of(self, name: str) -> str:
        """The class a job is held to: the one it names, or the default where nobody set it up."""
        return name if name in self._alpha_ns else ""

    def start(self, job: Job, now_ns: int) -> None:
        """The job begins to wait: it has arrived, or has just run."""
        job.ran_ns = job.clock_ns = now_ns
        self._pending[job.job_id] = job
        self._clocks[job.service_class][job.job_id] = job

    def stop(self, job: Job) -> None:
        """The job waits no more: it runs, or is gone."""
        del self._pending[job.job_id]
        self._clocks[job.service_class].pop(job.job_id, None)

    def starving(self, now_ns: int, limit: int) -> list[Job]:
        """Take up to `limit` jobs off the clock that have waited for alpha or longer, longest first per class."""
        taken: list[Job] = []
        for name, clocks in self._clocks.items():
            since_ns = now_ns - self.alpha_ns(name)
            while clocks and len(taken) < limit:
                job = next(iter(clocks.values()))
                if job.clock_ns > since_ns:
                    break
                del clocks[job.job_id]
                taken.append(job)
        return taken

    def restart(self, job: Job, now_ns: int) -> None:
        """A promoted job starves again only after another alpha. Its wait (`longest_wait_ns`) goes on."""
        job.clock_ns = now_ns
        self._clocks[job.service_class][job.job_id] = job

    def restart_all(self, now_ns: int) -> None:
        """After an outage: nobody was passed over while nothing could run."""
        for job in self._pending.values():
            job.clock_ns = now_ns

    def longest_wait_ns(self, now_ns: int) -> int:
        job = next(iter(self._pending.values()), None)
        return 0 if job is None else now_ns - job.ran_ns

    def longest_waits_ns(self, num_levels: int, now_ns: int) -> tuple[int, ...]:
        """By level: since the job that waits longest there last ran; 0 where nobody waits.

        Walks until one of each level is known."""
        waits_ns: dict[int, int] = {}
        for job in self._pending.values():
            waits_ns.setdefault(job.level if num_levels > 1 else 0, now_ns - job.ran_ns)
            if len(waits_ns) == num_levels:
                break
        return tuple(waits_ns.get(level, 0) for level in range(num_levels))

    def jobs(self) -> tuple[Job, ...]:
        """Those that wait, longest first."""
        return tuple(self._pending.values())

    def on_clock(self, job: Job) -> bool:
        return job.job_id in self._clocks[job.service_class]
