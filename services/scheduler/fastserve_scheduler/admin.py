"""What operators may see and change of a running scheduler. One order after the other."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fastserve_common.errors import InvalidArgumentError, NotFoundError
from fastserve_common.settings import SettingsError
from fastserve_scheduler.core.history import Moment
from fastserve_scheduler.overrides import CHANGEABLE, Entries, Overrides
from fastserve_scheduler.runner import Runner
from fastserve_scheduler.sessions import Session
from fastserve_scheduler.settings import SchedulerSettings

#: Who did what to the scheduler, and why. One line per order, whatever the log level of the rest.
audit = logging.getLogger("fastserve.audit")

DEFAULT_JOBS, MAX_JOBS = 100, 1000
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Operator:
    """Who gives an order, as far as the connection tells, and why they say they do."""

    peer: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobView:
    job_id: int
    request_id: str
    gateway_id: str
    state: str
    level: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    service_class: str
    age_ms: int
    waiting_ms: int
    preemptions: int
    replica: int


class Served(Protocol):
    """What the admin needs of the pipelines, all together."""

    @property
    def settings(self) -> SchedulerSettings: ...

    @property
    def draining(self) -> bool: ...

    @property
    def num_live(self) -> int: ...

    def live(self) -> Iterable[tuple[int, Runner, Session]]: ...

    def find(self, request_id: str) -> Session | None: ...

    def runner_of(self, job_id: int) -> Runner | None: ...

    def reconfigure(self, settings: SchedulerSettings) -> None: ...

    def begin_drain(self) -> None: ...

    def resume(self) -> None: ...

    def cancel_request(self, request_id: str) -> bool: ...


def effective(settings: SchedulerSettings) -> dict[str, object]:
    """What holds now, presets and defaults resolved, by the names of the settings."""
    mlfq = settings.mlfq_config()
    values = {name: getattr(settings, name) for name in CHANGEABLE}
    return values | {
        "alpha_ms": mlfq.alpha_ns / _NS_PER_MS,
        "promotion": mlfq.promotion,
        "quantum_ratio": mlfq.ratio,
        "num_queues": mlfq.num_levels,
        "eta": mlfq.eta,
        "demote_when": mlfq.demote_when,
        "prefill_chunk_tokens": settings.chunk_tokens,
    }


@dataclass(slots=True)
class Admin:
    served: Served
    overrides: Overrides
    clock_ns: Callable[[], int]
    revision: int = 0

    def config(self) -> dict[str, object]:
        return effective(self.served.settings)

    def configured(self) -> dict[str, object]:
        """What holds without what operators have changed."""
        return effective(self.overrides.configured)

    def update(self, changes: Mapping[str, str | int | float], operator: Operator) -> dict[str, object]:
        """All of `changes` or none. Raises InvalidArgumentError with the name of the setting that is wrong."""
        entries = self.overrides.with_changes(changes, operator.peer, operator.reason)
        return self._change("configuration changed", entries, operator)

    def reset(self, names: Iterable[str], operator: Operator) -> dict[str, object]:
        """To what this process was started with; no names: all. All or none. Raises InvalidArgumentError."""
        entries = self.overrides.without(tuple(names) or CHANGEABLE)
        return self._change("configuration reset", entries, operator)

    def adopt(self, entries: Entries) -> None:
        """What an earlier leader was told, found late. Raises SettingsError."""
        self.served.reconfigure(self.overrides.settings_of(entries))
        self.tell_adopted(entries)

    def tell_adopted(self, entries: Entries) -> None:
        if entries:
            said = {name: f"{self.configured()[name]} -> {entry.value}" for name, entry in entries.items()}
            audit.warning("configuration taken over from an earlier scheduler", extra={"changes": said})

    def _change(self, what: str, entries: Entries, operator: Operator) -> dict[str, object]:
        before = self.config()
        try:
            self.served.reconfigure(self.overrides.settings_of(entries))
        except SettingsError as error:
            raise InvalidArgumentError(str(error)) from error
        self.overrides.entries = entries
        after = self.config()
        self.revision += 1
        said = {name: f"{before[name]} -> {after[name]}" for name in CHANGEABLE if before[name] != after[name]}
        self._audit(what, operator, revision=self.revision, changes=said)
        return after

    def drain(self, operator: Operator) -> int:
        """Requests in progress, which go on."""
        self.served.begin_drain()
        live = self.served.num_live
        self._audit("draining", operator, live=live)
        return live

    def resume(self, operator: Operator) -> None:
        self.served.resume()
        self._audit("resumed", operator)

    def abort(self, request_id: str, operator: Operator) -> None:
        """Raises NotFoundError."""
        if not self.served.cancel_request(request_id):
            raise NotFoundError(f"no live request has the id {request_id!r}")
        self._audit("request aborted", operator, request_id=request_id)

    def jobs(self, limit: int) -> tuple[list[JobView], int]:
        """The oldest first, up to `limit` of them; and how many there are."""
        views = [view for at in self.served.live() if (view := _view(*at, self.clock_ns())) is not None]
        views.sort(key=lambda view: -view.age_ms)
        return views[: min(limit or DEFAULT_JOBS, MAX_JOBS)], len(views)

    def story(self, request_id: str, job_id: int) -> tuple[int, tuple[Moment, ...]]:
        """By request id while it is live, by job id also afterwards. Raises NotFoundError."""
        session = self.served.find(request_id) if request_id else None
        if session is not None:
            job_id = session.job_id
        elif request_id:
            raise NotFoundError(f"no live request has the id {request_id!r}; one that ended has its job id alone")
        runner = self.served.runner_of(job_id)
        moments = runner.core.story(job_id) if runner is not None else ()
        if not moments:
            raise NotFoundError(f"nothing is remembered of job {job_id}")
        return job_id, moments

    def _audit(self, what: str, operator: Operator, **facts: object) -> None:
        audit.warning(what, extra={"peer": operator.peer, "reason": operator.reason, **facts})


def _view(replica: int, runner: Runner, session: Session, now_ns: int) -> JobView | None:
    """None when the request is not with the core."""
    job = runner.core.jobs.get(session.job_id)
    if job is None:
        return None
    return JobView(
        job_id=job.job_id,
        request_id=session.submit.request_id,
        gateway_id=session.link.gateway_id,
        state="running" if job.in_flight else job.kv.value,
        level=job.level if runner.core.order.level_sizes() else 0,
        prompt_tokens=session.prompt_tokens,
        output_tokens=session.output_tokens,
        max_tokens=session.submit.max_tokens,
        priority=job.priority,
        service_class=job.service_class,
        age_ms=max(0, now_ns - job.arrived_ns) // _NS_PER_MS,
        waiting_ms=0 if job.in_flight else max(0, now_ns - job.ran_ns) // _NS_PER_MS,
        preemptions=session.preemptions,
        replica=replica,
    )
