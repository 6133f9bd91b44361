"""A core as data: nothing of it is forgotten in silence, and nothing but a core comes out of a file."""

import json
from typing import Any, cast

import pytest

from fastserve_scheduler.core.checkpoint import CheckpointError, decode, encode
from fastserve_scheduler.core.events import IterationDone, JobArrived
from fastserve_scheduler.core.scheduler import SchedulerCore

from .support import MS, ready_core, revived


def _busy() -> SchedulerCore:
    core = ready_core(policy="predicted", kv_policy="proactive")
    for job_id in range(5):
        core.handle(JobArrived(job_id, 5, 3, program="agent"), job_id)
    core.handle(IterationDone(0, 0, 10 * MS), 10 * MS)
    return core


def _stored() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps(encode(_busy()))))


def _decoded(stored: object) -> SchedulerCore:
    core = _busy()
    return decode(stored, core.config, core.predictor.profile)


def test_what_is_one_object_stays_one() -> None:
    core = revived(_busy())
    assert core.order is core.rescue._order
    flight = next(iter(core.flights.values()))
    assert all(core.jobs[job.job_id] is job for job in flight.jobs)
    core.check()


@pytest.mark.parametrize("value", [0.5, {1, 2}, b"x", object(), len, lambda: 1])
def test_state_of_a_kind_that_nobody_thought_of_is_refused(value: object) -> None:
    core = _busy()
    core.order.remembered = value  # type: ignore[attr-defined]  # what somebody may add one day
    with pytest.raises(CheckpointError):
        encode(core)


def test_new_state_of_a_known_kind_is_carried() -> None:
    core = _busy()
    core.order.remembered = {(1, 2): [True, None]}  # type: ignore[attr-defined]  # as above
    found = encode(core)
    names = cast(dict[str, tuple[str, ...]], found["classes"])["Predicted"]
    assert "remembered" in names
    assert ["list", True, None] in cast(list[list[object]], found["objects"])


def test_attributes_that_this_version_does_not_have_are_named() -> None:
    stored = _stored()
    stored["classes"]["Job"] += ["aura"]
    stored["classes"]["Job"].remove("program")
    with pytest.raises(CheckpointError, match="another version: Job differs in aura, program"):
        _decoded(stored)


def test_no_other_class_comes_out_of_a_file() -> None:
    stored = _stored()
    stored["classes"]["Popen"] = ["args"]
    stored["objects"].append(["Popen", "sh"])
    with pytest.raises(CheckpointError, match="this one has no Popen"):
        _decoded(stored)


@pytest.mark.parametrize(
    "row", [["Popen"], ["Job", 1], ["list", {"@": 99999}], ["list", 0.5], ["method", {"@": 0}, "__init__"], [], 7]
)
def test_damage_is_told(row: object) -> None:
    stored = _stored()
    stored["objects"].append(row)
    with pytest.raises(CheckpointError, match="damaged"):
        _decoded(stored)


@pytest.mark.parametrize("stored", [None, 3, [], {}, {"classes": {}, "objects": []}, {"classes": 1, "objects": 2}])
def test_what_is_no_state_is_refused(stored: object) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        _decoded(stored)


def test_the_state_is_a_cores() -> None:
    stored = _stored()
    stored["objects"] = [["list", 1]]
    with pytest.raises(CheckpointError, match="not that of a core"):
        _decoded(stored)


def test_a_compiled_core_says_that_it_cannot_go_on_from_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _stored()
    monkeypatch.setattr(SchedulerCore, "__mypyc_attrs__", (), raising=False)
    with pytest.raises(CheckpointError, match="use the Python one"):
        _decoded(stored)
