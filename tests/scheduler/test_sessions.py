"""Ids of live requests, without a network."""

from array import array
from dataclasses import dataclass, field, replace

import pytest

from fastserve_scheduler.core.commands import PlanItem
from fastserve_scheduler.messages import (
    Cancel,
    CancelReason,
    Finished,
    Refusal,
    Rejected,
    Report,
    Sampling,
    SchedulerMessage,
    StopReason,
    Submit,
    Tokens,
)
from fastserve_scheduler.sessions import Sessions


@dataclass
class FakeLink:
    gateway_id: str = "gw"
    closed: bool = False
    said: list[SchedulerMessage] = field(default_factory=list)

    def send(self, message: SchedulerMessage) -> None:
        self.said.append(message)


def ids(*values: int) -> "array[int]":
    return array("I", values)


SUBMIT = Submit("r", ids(1, 2, 3), ids(), Sampling(b"enc"), max_tokens=5)


def decode(job_id: int, position: int, prompt: int = 3) -> PlanItem:
    start = prompt + position - 1
    return PlanItem(job_id, start, 1, True, position, (4,))


def drawn(*values: int) -> Report:
    return Report(1, 1, 0, 1, 1, ids(*values))


def test_a_prompt_goes_out_whole_and_a_decode_as_its_last_id() -> None:
    sessions, link = Sessions(), FakeLink()
    event = sessions.open(SUBMIT, link)
    assert event is not None
    [prefill] = sessions.wire_items([PlanItem(event.job_id, 0, 3, True, 0, (4, 5))])
    assert (prefill.token_ids, prefill.block_table) == (ids(1, 2, 3).tobytes(), ids(4, 5).tobytes())
    assert (prefill.sampling, prefill.suppressed, prefill.history) == (b"enc", b"", (b"", b""))
    sessions.apply([PlanItem(event.job_id, 0, 3, True, 0, (4, 5))], drawn(9))
    [one] = sessions.wire_items([decode(event.job_id, 1)])
    assert one.token_ids == ids(9).tobytes()
    [again] = sessions.wire_items([PlanItem(event.job_id, 0, 4, True, 1, (4,))])
    assert again.token_ids == ids(1, 2, 3, 9).tobytes(), "computed again: prompt and output"


def test_tokens_are_counted_once_by_position() -> None:
    sessions, link = Sessions(), FakeLink()
    event = sessions.open(SUBMIT, link)
    assert event is not None
    first = PlanItem(event.job_id, 0, 3, True, 0, (4,))
    sessions.apply([first], drawn(9))
    sessions.apply([first], drawn(9))
    sessions.apply([decode(event.job_id, 1)], drawn(8))
    assert link.said == [Tokens("r", 0, ids(9).tobytes()), Tokens("r", 1, ids(8).tobytes())]


def test_log_probabilities_go_to_those_who_asked_and_again_to_a_gateway_that_comes_back() -> None:
    sessions, link = Sessions(), FakeLink()
    asked = replace(SUBMIT, request_id="asked", delivered=ids(7), sampling=Sampling(b"enc", logprobs=True))
    one, other = sessions.open(asked, link), sessions.open(SUBMIT, link)
    assert one is not None
    assert other is not None
    for position in (1, 2):
        mates = [decode(one.job_id, position), decode(other.job_id, position - 1)]
        sessions.apply(mates, Report(1, 1, 0, 1, 1, ids(10 + position, 20), (b"of-%d" % position, b"")))
    assert link.said[0] == Tokens("asked", 1, ids(11).tobytes(), (b"of-1",))
    assert [message.logprobs for message in link.said if isinstance(message, Tokens)] == [
        (b"of-1",), (), (b"of-2",), (),
    ]  # fmt: skip
    for delivered, expected in (
        (ids(7, 11), Tokens("asked", 2, ids(12).tobytes(), (b"of-2",))),
        (ids(7), Tokens("asked", 1, ids(11, 12).tobytes(), (b"of-1", b"of-2"))),
    ):
        again = FakeLink()
        assert sessions.open(replace(asked, delivered=delivered), again) is None
        assert again.said == [expected]
    late = FakeLink()
    assert sessions.open(replace(asked, delivered=ids()), late) is None
    assert [type(message) for message in late.said] == [Rejected], "nobody here knows them for the first token"


def test_items_that_do_not_sample_have_no_id_in_the_report() -> None:
    sessions, link = Sessions(), FakeLink()
    one, two = sessions.open(SUBMIT, link), sessions.open(replace(SUBMIT, request_id="s"), link)
    assert one is not None
    assert two is not None
    items = [PlanItem(one.job_id, 0, 2, False, 0, (4,)), PlanItem(two.job_id, 0, 3, True, 0, (5,))]
    sessions.apply(items, drawn(7))
    assert link.said == [Tokens("s", 0, ids(7).tobytes())]


def test_penalties_get_prompt_and_output_apart() -> None:
    sessions, link = Sessions(), FakeLink()
    event = sessions.open(replace(SUBMIT, sampling=Sampling(b"enc", needs_history=True)), link)
    assert event is not None
    first = PlanItem(event.job_id, 0, 3, True, 0, (4,))
    assert sessions.wire_items([first])[0].history == (ids(1, 2, 3).tobytes(), b"")
    sessions.apply([first], drawn(9))
    assert sessions.wire_items([decode(event.job_id, 1)])[0].history == (ids(1, 2, 3).tobytes(), ids(9).tobytes())
    inner = PlanItem(event.job_id, 0, 2, False, 0, (4,))
    assert sessions.wire_items([inner])[0].history == (b"", b""), "nothing is drawn, nothing is needed"


def test_stop_ids_are_suppressed_and_ignored_below_min_tokens() -> None:
    sessions, link = Sessions(), FakeLink()
    event = sessions.open(replace(SUBMIT, min_tokens=1, stop_ids=frozenset((9, 7))), link)
    assert event is not None
    first = PlanItem(event.job_id, 0, 3, True, 0, (4,))
    assert sessions.wire_items([first])[0].suppressed == ids(7, 9).tobytes()
    assert sessions.apply([first], drawn(9)) == (), "a stage that draws it all the same does not end the answer"
    assert sessions.wire_items([decode(event.job_id, 1)])[0].suppressed == b""
    assert sessions.apply([decode(event.job_id, 1)], drawn(9)) == (event.job_id,)
    assert sessions.finish(event.job_id, StopReason.STOP_TOKEN) == Finished("r", StopReason.STOP_TOKEN, 9, 2, 0)


def test_delivered_ids_are_output() -> None:
    sessions, link = Sessions(), FakeLink()
    event = sessions.open(replace(SUBMIT, delivered=ids(9, 8)), link)
    assert event is not None
    assert (event.prompt_tokens, event.output_tokens, event.max_output_tokens) == (3, 2, 5)
    item = PlanItem(event.job_id, 0, 5, True, 2, (4, 5))
    assert sessions.wire_items([item])[0].token_ids == ids(1, 2, 3, 9, 8).tobytes()
    sessions.apply([item], drawn(7))
    assert link.said == [Tokens("r", 2, ids(7).tobytes())]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ids(1, 2)},
        {"delivered": ids(1, 2, 3)},
    ],
    ids=["another prompt", "more than there is"],
)
def test_another_request_under_a_live_id_is_refused(change: dict[str, "array[int]"]) -> None:
    sessions, old, new = Sessions(), FakeLink(closed=True), FakeLink()
    sessions.open(SUBMIT, old)
    assert sessions.open(replace(SUBMIT, **change), new) is None  # type: ignore[arg-type]  # fields by name
    [said] = new.said
    assert isinstance(said, Rejected)
    assert said.reason is Refusal.DUPLICATE_ID


def test_a_cancelled_request_gets_no_more_tokens() -> None:
    sessions, link = Sessions(), FakeLink()
    event = sessions.open(SUBMIT, link)
    assert event is not None
    assert sessions.cancel(Cancel("r", CancelReason.STOP_STRING), link) == event.job_id
    sessions.apply([PlanItem(event.job_id, 0, 3, True, 0, (4,))], drawn(9))
    sessions.finish(event.job_id, StopReason.CANCELLED)
    assert link.said == [Finished("r", StopReason.STOP_STRING, 0, 0, 0)]


def test_computing_again_is_a_preemption_unless_a_stage_was_lost() -> None:
    sessions, link = Sessions(), FakeLink()
    event = sessions.open(SUBMIT, link)
    assert event is not None
    again = PlanItem(event.job_id, 0, 3, True, 0, (4,))
    sessions.wire_items([again])
    sessions.kv_lost()
    sessions.wire_items([again])
    assert sessions.finish(event.job_id, StopReason.LENGTH).preemptions == 0
    event = sessions.open(SUBMIT, link)
    assert event is not None
    again = again._replace(job_id=event.job_id)
    sessions.wire_items([again])
    sessions.wire_items([again])
    assert sessions.finish(event.job_id, StopReason.LENGTH).preemptions == 1
