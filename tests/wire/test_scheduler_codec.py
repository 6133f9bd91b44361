"""The scheduler's codec: what one side encodes is what the generated types say, and back."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve.v1 import sampling_pb2, scheduler_pb2, stage_pb2
from fastserve_scheduler import codec
from fastserve_scheduler.kv_messages import HostArena
from fastserve_scheduler.messages import (
    Batch,
    Cancel,
    CancelReason,
    Configure,
    Fault,
    Finished,
    GatewayHello,
    Hello,
    Load,
    Measure,
    Measured,
    Point,
    Ready,
    Refusal,
    Rejected,
    Report,
    Sampling,
    Status,
    StopReason,
    Submit,
    SwapReport,
    Tokens,
    UnknownMessage,
    WireItem,
    WirePlan,
    WireSwap,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
names = st.text(max_size=20)
packed = st.lists(u32, max_size=8).map(lambda values: array("I", values).tobytes())
ids = st.lists(u32, max_size=8).map(lambda values: array("I", values))


@st.composite
def samplings(draw: st.DrawFn) -> sampling_pb2.SamplingParams:
    params = sampling_pb2.SamplingParams(
        temperature=draw(st.floats(0, 2)),
        top_k=draw(u32),
        top_p=draw(st.floats(0, 1)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([0.0, 1.0, 1.2])),
        logit_bias=draw(st.dictionaries(u32, st.floats(-100, 100, width=32), max_size=3)),
    )
    if draw(st.booleans()):
        params.logprobs = draw(st.integers(0, 20))
    return params


@st.composite
def items(draw: st.DrawFn) -> WireItem:
    sample = draw(st.booleans())
    history = draw(st.tuples(packed, packed)) if sample else (b"", b"")
    return WireItem(
        job_id=draw(u64),
        start=draw(u32),
        num_tokens=draw(u32),
        block_table=draw(packed),
        token_ids=draw(packed),
        sample=sample,
        sampling=draw(samplings()).SerializeToString(deterministic=True) if sample else b"",
        output_position=draw(u32) if sample else 0,
        suppressed=draw(packed) if sample else b"",
        history=history,
    )


def _item_from_pb(pb: stage_pb2.PlanItem) -> WireItem:
    return WireItem(
        job_id=pb.job_id,
        start=pb.start,
        num_tokens=pb.num_tokens,
        block_table=pb.block_table,
        token_ids=pb.token_ids,
        sample=pb.sample,
        sampling=pb.sampling.SerializeToString(deterministic=True) if pb.HasField("sampling") else b"",
        output_position=pb.output_position,
        suppressed=pb.suppressed_token_ids,
        history=(pb.penalty_prompt_ids, pb.penalty_output_ids),
    )


def _swap_from_pb(pb: stage_pb2.SwapOp) -> WireSwap:
    assert pb.direction != stage_pb2.SWAP_DIRECTION_UNSPECIFIED
    out = pb.direction == stage_pb2.SWAP_DIRECTION_OUT
    return WireSwap(pb.swap_id, pb.job_id, out, pb.device_blocks, pb.host_slots)


swaps = st.lists(st.builds(WireSwap, u64, u64, st.booleans(), packed, packed), max_size=4).map(tuple)


@settings(deadline=None)
@given(st.builds(WirePlan, u64, u64, st.lists(items(), max_size=5).map(tuple), swaps, u64))
def test_plans_round_trip(plan: WirePlan) -> None:
    pb = stage_pb2.ControlMessage.FromString(codec.control_message_to_wire(plan)).plan
    items, swaps = tuple(map(_item_from_pb, pb.items)), tuple(map(_swap_from_pb, pb.swaps))
    assert WirePlan(pb.seq, pb.epoch, items, swaps, pb.host_generation) == plan


@settings(deadline=None)
@given(u64, names)
def test_configure_round_trips(epoch: int, address: str) -> None:
    pb = stage_pb2.ControlMessage.FromString(codec.control_message_to_wire(Configure(epoch, address))).configure
    assert (pb.epoch, pb.next_stage_address) == (epoch, address)


@settings(deadline=None)
@given(st.builds(Measure, u64, u64, st.lists(st.builds(Point, u32, u32, u32), max_size=5).map(tuple)))
def test_profile_orders_round_trip(order: Measure) -> None:
    pb = stage_pb2.ControlMessage.FromString(codec.control_message_to_wire(order)).profile
    points = tuple(Point(p.num_sequences, p.new_tokens, p.context_tokens) for p in pb.points)
    assert Measure(pb.profile_id, pb.epoch, points) == order


@settings(deadline=None)
@given(
    request_id=names,
    prompt=ids,
    delivered=ids,
    sampling=st.none() | samplings(),
    counts=st.tuples(u32, u32, u32, u32),
    stop=st.sets(u32, max_size=4),
    priority=st.integers(-(2**31), 2**31 - 1),
    service_class=names,
)
def test_submits_round_trip(
    request_id: str,
    prompt: "array[int]",
    delivered: "array[int]",
    sampling: sampling_pb2.SamplingParams | None,
    counts: tuple[int, int, int, int],
    stop: set[int],
    priority: int,
    service_class: str,
) -> None:
    pb = scheduler_pb2.SubmitRequest(
        request_id=request_id,
        prompt_token_ids=prompt.tobytes(),
        delivered_token_ids=delivered.tobytes(),
        sampling=sampling,
        max_tokens=counts[0],
        min_tokens=counts[1],
        stop_token_ids=sorted(stop),
        priority=priority,
        service_class=service_class,
        oracle_tokens=counts[2],
        expected_output_tokens=counts[3],
        program=service_class,
    )
    got = codec.gateway_message_from_wire(scheduler_pb2.GatewayMessage(submit=pb).SerializeToString())
    assert isinstance(got, Submit)
    sent = sampling or sampling_pb2.SamplingParams()
    assert sampling_pb2.SamplingParams.FromString(got.sampling.encoded) == sent
    penalties = sent.presence_penalty != 0 or sent.frequency_penalty != 0 or sent.repetition_penalty == 1.2
    assert got.sampling.needs_history == penalties
    assert got == Submit(
        request_id,
        prompt,
        delivered,
        got.sampling,
        counts[0],
        counts[1],
        frozenset(stop),
        priority,
        service_class,
        counts[2],
        counts[3],
        service_class,
    )


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (scheduler_pb2.CANCEL_REASON_UNSPECIFIED, CancelReason.CLIENT),
        (scheduler_pb2.CANCEL_REASON_CLIENT, CancelReason.CLIENT),
        (scheduler_pb2.CANCEL_REASON_STOP_STRING, CancelReason.STOP_STRING),
    ],
)
def test_cancels_and_hellos_round_trip(reason: scheduler_pb2.CancelReason.ValueType, expected: CancelReason) -> None:
    pb = scheduler_pb2.GatewayMessage(cancel=scheduler_pb2.CancelRequest(request_id="r", reason=reason))
    assert codec.gateway_message_from_wire(pb.SerializeToString()) == Cancel("r", expected)
    pb = scheduler_pb2.GatewayMessage(hello=scheduler_pb2.GatewayHello(gateway_id="g"))
    assert codec.gateway_message_from_wire(pb.SerializeToString()) == GatewayHello("g")
    pb.hello.accepts_batches = True
    assert codec.gateway_message_from_wire(pb.SerializeToString()) == GatewayHello("g", accepts_batches=True)


def _said(data: bytes) -> scheduler_pb2.SchedulerMessage:
    return scheduler_pb2.SchedulerMessage.FromString(data)


def test_a_batch_is_its_messages_in_order() -> None:
    parts = (Tokens("a", 1, bytes(4)), Finished("b", StopReason.LENGTH, 0, 3, 0), Rejected("c", Refusal.TOO_LONG, "x"))
    batch = _said(codec.scheduler_message_to_wire(Batch(parts))).batch
    assert list(batch.messages) == [_said(codec.scheduler_message_to_wire(part)) for part in parts]


@settings(deadline=None)
@given(st.builds(Tokens, names, u32, packed, st.just(())))
def test_tokens_round_trip(tokens: Tokens) -> None:
    pb = _said(codec.scheduler_message_to_wire(tokens)).tokens
    assert Tokens(pb.request_id, pb.offset, pb.token_ids) == tokens


def test_log_probabilities_pass_through_unread() -> None:
    top = sampling_pb2.TopLogprob(token_id=4, logprob=-1)
    entry = sampling_pb2.TokenLogprobs(token_id=3, logprob=-0.5, top=[top])
    report = stage_pb2.IterationReport(seq=1, logprobs=[sampling_pb2.TokenLogprobs(), entry], token_ids=bytes(8))
    got = codec.stage_message_from_wire(stage_pb2.StageMessage(iteration=report).SerializeToString())
    assert isinstance(got, Report)
    tokens = Tokens("r", 0, bytes(4), got.logprobs[1:])
    assert list(_said(codec.scheduler_message_to_wire(tokens)).tokens.logprobs) == [entry]


# Nobody outside the scheduler hears that a request was moved.
@pytest.mark.parametrize("reason", [reason for reason in StopReason if reason is not StopReason.MOVED])
def test_every_outcome_has_a_number_of_its_own(reason: StopReason) -> None:
    pb = _said(codec.scheduler_message_to_wire(Finished("r", reason, 7, 8, 9))).finished
    name = scheduler_pb2.StopReason.Name(pb.reason)
    assert name == "STOP_REASON_" + reason.name
    assert (pb.request_id, pb.stop_token_id, pb.output_tokens, pb.preemptions) == ("r", 7, 8, 9)


@pytest.mark.parametrize("reason", Refusal)
def test_every_refusal_has_a_number_of_its_own(reason: Refusal) -> None:
    pb = _said(codec.scheduler_message_to_wire(Rejected("r", reason, "why", 250))).rejected
    assert scheduler_pb2.RejectReason.Name(pb.reason) == "REJECT_REASON_" + reason.name
    assert (pb.request_id, pb.message, pb.retry_after_ms) == ("r", "why", 250)


def test_hello_and_status_round_trip() -> None:
    pb = _said(codec.scheduler_message_to_wire(Hello(1, 2, 3, "fcfs", 4))).hello
    assert (pb.generation, pb.max_model_len, pb.max_request_tokens, pb.policy, pb.num_stages) == (1, 2, 3, "fcfs", 4)
    load = _said(codec.scheduler_message_to_wire(Load(12, 3, 2, "a-model", 9))).load
    assert (load.waiting_prompt_tokens, load.live, load.pipelines) == (12, 3, 2)
    assert (load.model_fingerprint, load.accepted) == ("a-model", 9)
    status = _said(codec.scheduler_message_to_wire(Status(True, "all there"))).status
    assert (status.ready, status.detail) == (True, "all there")


@settings(deadline=None)
@given(st.builds(Ready, *[u64, *[u32] * 6, names, u64, names, names, st.builds(HostArena, u64, u32, names)]))
def test_ready_round_trips(ready: Ready) -> None:
    pb = stage_pb2.StageReady(
        epoch=ready.epoch,
        stage=ready.stage,
        num_stages=ready.num_stages,
        num_blocks=ready.num_blocks,
        block_size=ready.block_size,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        model_fingerprint=ready.fingerprint,
        kv_block_bytes=ready.kv_block_bytes,
        device=ready.device,
        dtype=ready.dtype,
        num_host_slots=ready.host.num_slots,
        host_generation=ready.host.generation,
        host_node=ready.host.node,
    )
    assert codec.stage_message_from_wire(stage_pb2.StageMessage(ready=pb).SerializeToString()) == ready


@settings(deadline=None)
@given(st.builds(Report, u64, u64, u32, u64, u64, ids))
def test_reports_round_trip(report: Report) -> None:
    pb = stage_pb2.IterationReport(
        seq=report.seq,
        epoch=report.epoch,
        stage=report.stage,
        compute_ns=report.compute_ns,
        total_compute_ns=report.total_compute_ns,
        token_ids=report.token_ids.tobytes(),
    )
    assert codec.stage_message_from_wire(stage_pb2.StageMessage(iteration=pb).SerializeToString()) == report


def test_swap_reports_and_host_arenas_round_trip() -> None:
    swap = stage_pb2.SwapReport(swap_id=1, epoch=2, stage=3, bytes=4, copy_ns=5, error="checksum")
    message = stage_pb2.StageMessage(swap=swap).SerializeToString()
    assert codec.stage_message_from_wire(message) == SwapReport(1, 2, 3, 4, 5, "checksum")
    host = stage_pb2.StageMessage(host=stage_pb2.HostArena(generation=1, num_slots=2, node="here"))
    assert codec.stage_message_from_wire(host.SerializeToString()) == HostArena(1, 2, "here")


def test_faults_and_profile_reports_round_trip() -> None:
    fault = stage_pb2.StageMessage(fault=stage_pb2.StageFault(seq=1, epoch=2, message="why"))
    assert codec.stage_message_from_wire(fault.SerializeToString()) == Fault(1, 2, "why")
    measured = stage_pb2.StageMessage(profile=stage_pb2.ProfileReport(profile_id=1, stage=2, compute_ns=[3, 4]))
    assert codec.stage_message_from_wire(measured.SerializeToString()) == Measured(1, 2, (3, 4))


def test_a_message_of_a_newer_peer_is_tolerated() -> None:
    """Field 15 of both unions is a message that nobody knows yet; field 14 of a submit likewise."""
    unknown = bytes([15 << 3 | 2, 2, 0x08, 0x01])
    assert codec.gateway_message_from_wire(unknown) == UnknownMessage()
    assert codec.stage_message_from_wire(unknown) == UnknownMessage()
    submit = scheduler_pb2.SubmitRequest(request_id="r").SerializeToString() + bytes([14 << 3, 1])
    got = codec.gateway_message_from_wire(bytes([2 << 3 | 2, len(submit)]) + submit)
    assert isinstance(got, Submit)
    assert got.request_id == "r"


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05a", b"\x12\x04\x12\x02ab"])
def test_bytes_that_are_no_message_are_a_value_error(data: bytes) -> None:
    """The last one is a submit whose prompt is not a whole number of ids."""
    with pytest.raises(ValueError, match=r"not a|whole number|multiple"):
        codec.gateway_message_from_wire(data)


def test_a_submit_without_sampling_is_greedy() -> None:
    pb = scheduler_pb2.GatewayMessage(submit=scheduler_pb2.SubmitRequest(request_id="r"))
    got = codec.gateway_message_from_wire(pb.SerializeToString())
    assert isinstance(got, Submit)
    assert got.sampling == Sampling()
