"""Wire <-> messages. The only module of this service that knows the generated types.

The functions without a leading underscore are gRPC serializers and deserializers: bytes on one side, a message
on the other. A deserializer raises ValueError for bytes that are no message of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from fastserve.v1 import sampling_pb2, scheduler_pb2, stage_pb2
from fastserve_common.cluster_state import sum_states
from fastserve_common.packed import unpack_u32
from fastserve_scheduler.core.snapshot import Snapshot, SwapSnapshot
from fastserve_scheduler.kv_messages import HostArena
from fastserve_scheduler.messages import (
    Batch,
    Cancel,
    CancelReason,
    Configure,
    ControlMessage,
    Fault,
    Finished,
    GatewayHello,
    GatewayMessage,
    Hello,
    Load,
    Measure,
    Measured,
    Ready,
    Refusal,
    Rejected,
    Report,
    RequestMessage,
    Sampling,
    SchedulerMessage,
    StageMessage,
    Status,
    StopReason,
    Submit,
    SwapReport,
    Tokens,
    UnknownMessage,
    WireItem,
    WirePlan,
)

M = TypeVar("M", bound=Message)

SCHEDULER_SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
STAGE_CONTROL_METHOD = f"/{stage_pb2.DESCRIPTOR.services_by_name['Stage'].full_name}/Control"
SERVICE_NAMES = (SCHEDULER_SERVICE,)

_STOP_REASONS: Mapping[StopReason, scheduler_pb2.StopReason.ValueType] = {
    StopReason.STOP_TOKEN: scheduler_pb2.STOP_REASON_STOP_TOKEN,
    StopReason.LENGTH: scheduler_pb2.STOP_REASON_LENGTH,
    StopReason.CANCELLED: scheduler_pb2.STOP_REASON_CANCELLED,
    StopReason.ERROR: scheduler_pb2.STOP_REASON_ERROR,
    StopReason.STOP_STRING: scheduler_pb2.STOP_REASON_STOP_STRING,
}
_REFUSALS: Mapping[Refusal, scheduler_pb2.RejectReason.ValueType] = {
    Refusal.TOO_LONG: scheduler_pb2.REJECT_REASON_TOO_LONG,
    Refusal.QUEUE_FULL_REQUESTS: scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS,
    Refusal.QUEUE_FULL_TOKENS: scheduler_pb2.REJECT_REASON_QUEUE_FULL_TOKENS,
    Refusal.DUPLICATE_ID: scheduler_pb2.REJECT_REASON_DUPLICATE_ID,
    Refusal.NOT_READY: scheduler_pb2.REJECT_REASON_NOT_READY,
    Refusal.DRAINING: scheduler_pb2.REJECT_REASON_DRAINING,
    Refusal.INVALID: scheduler_pb2.REJECT_REASON_INVALID,
}
_CANCEL_REASONS = {
    scheduler_pb2.CANCEL_REASON_STOP_STRING: CancelReason.STOP_STRING,
}


# --- gateway -> scheduler


def gateway_message_from_wire(data: bytes) -> GatewayMessage:
    pb = _parse(scheduler_pb2.GatewayMessage, data)
    match pb.WhichOneof("message"):
        case "hello":
            return GatewayHello(pb.hello.gateway_id, pb.hello.accepts_batches)
        case "submit":
            return _submit_from_pb(pb.submit)
        case "cancel":
            reason = _CANCEL_REASONS.get(pb.cancel.reason, CancelReason.CLIENT)
            return Cancel(pb.cancel.request_id, reason)
        case _:
            return UnknownMessage()


def _submit_from_pb(pb: scheduler_pb2.SubmitRequest) -> Submit:
    return Submit(
        request_id=pb.request_id,
        prompt=unpack_u32(pb.prompt_token_ids),
        delivered=unpack_u32(pb.delivered_token_ids),
        sampling=_sampling_from_pb(pb.sampling) if pb.HasField("sampling") else Sampling(),
        max_tokens=pb.max_tokens,
        min_tokens=pb.min_tokens,
        stop_ids=frozenset(pb.stop_token_ids),
        priority=pb.priority,
        service_class=pb.service_class,
        oracle_tokens=pb.oracle_tokens,
        expected_output_tokens=pb.expected_output_tokens,
        program=pb.program,
        traceparent=pb.traceparent,
    )


def _sampling_from_pb(pb: sampling_pb2.SamplingParams) -> Sampling:
    # A repetition penalty of 0 is an unset field, not a wish.
    repetition = pb.repetition_penalty not in (0.0, 1.0)
    needs_history = bool(pb.presence_penalty or pb.frequency_penalty or repetition)
    return Sampling(pb.SerializeToString(), needs_history, pb.HasField("logprobs"))


# --- scheduler -> gateway


def scheduler_message_to_wire(message: SchedulerMessage) -> bytes:
    pb = scheduler_pb2.SchedulerMessage()
    match message:
        case Batch(messages):
            for part in messages:
                _fill_request_message(pb.batch.messages.add(), part)
        case Tokens() | Finished() | Rejected():
            _fill_request_message(pb, message)
        case Status(ready, detail):
            pb.status.ready, pb.status.detail = ready, detail
        case Load(waiting_prompt_tokens, live, pipelines, fingerprint, accepted):
            pb.load.waiting_prompt_tokens, pb.load.live, pb.load.pipelines = waiting_prompt_tokens, live, pipelines
            pb.load.model_fingerprint, pb.load.accepted = fingerprint, accepted
        case Hello():
            hello = pb.hello
            hello.generation = message.generation
            hello.max_model_len, hello.max_request_tokens = message.max_model_len, message.max_request_tokens
            hello.policy, hello.num_stages = message.policy, message.num_stages
    return pb.SerializeToString()


def _fill_request_message(pb: scheduler_pb2.SchedulerMessage, message: RequestMessage) -> None:
    match message:
        case Tokens(request_id, offset, token_ids, logprobs):
            tokens = pb.tokens
            tokens.request_id, tokens.offset, tokens.token_ids = request_id, offset, token_ids
            for encoded in logprobs:
                tokens.logprobs.add().ParseFromString(encoded)
        case Finished(request_id, reason, stop_token_id, output_tokens, preemptions):
            finished = pb.finished
            finished.request_id, finished.reason = request_id, _STOP_REASONS[reason]
            finished.stop_token_id = stop_token_id
            finished.output_tokens, finished.preemptions = output_tokens, preemptions
        case Rejected(request_id, refusal, text, retry_after_ms):
            rejected = pb.rejected
            rejected.request_id, rejected.reason = request_id, _REFUSALS[refusal]
            rejected.message, rejected.retry_after_ms = text, retry_after_ms


# --- GetState


@dataclass(frozen=True, slots=True)
class ClusterState:
    """`snapshot`: None before the first pipeline is ready. `stages`: (stage, up, address, last iteration in ns)."""

    policy: str
    snapshot: Snapshot | None
    stages: tuple[tuple[int, bool, str, int], ...]


@dataclass(frozen=True, slots=True)
class FleetState:
    """At least one."""

    replicas: tuple[ClusterState, ...]


def state_to_wire(state: FleetState) -> bytes:
    parts = [_state(replica, index) for index, replica in enumerate(state.replicas)]
    return sum_states(parts).SerializeToString()


def _state(state: ClusterState, replica: int) -> scheduler_pb2.GetStateResponse:
    pb = scheduler_pb2.GetStateResponse(policy=state.policy)
    for stage, up, address, last_ns in state.stages:
        pb.stages.add(stage=stage, up=up, address=address, last_iteration_ns=last_ns, replica=replica)
    if state.snapshot is not None:
        _fill_snapshot(pb, state.snapshot)
    return pb


def _fill_snapshot(pb: scheduler_pb2.GetStateResponse, snapshot: Snapshot) -> None:
    pb.running, pb.waiting = snapshot.running, snapshot.waiting
    pb.device_blocks_total, pb.device_blocks_free = snapshot.blocks_total, snapshot.blocks_free
    pb.batches_in_flight, pb.iterations = snapshot.batches_in_flight, snapshot.iterations
    pb.preemptions = snapshot.preemptions_slots + snapshot.preemptions_tokens + snapshot.preemptions_blocks
    pb.promotions, pb.demotions = snapshot.promotions, sum(snapshot.demotions)
    pb.longest_wait_ms = snapshot.longest_wait_ns // 1_000_000
    pb.tokens_generated = snapshot.generated_tokens
    _fill_swap_state(pb, snapshot.swap)
    for level, count in enumerate(snapshot.levels):
        quantum_ns = snapshot.quantum_ns[level] if level < len(snapshot.quantum_ns) else 0
        pb.levels.add(level=level, quantum_ns=quantum_ns, waiting=count.waiting, running=count.running)


def _fill_swap_state(pb: scheduler_pb2.GetStateResponse, swap: SwapSnapshot) -> None:
    pb.swapped = swap.swapped
    pb.host_blocks_total, pb.host_blocks_free = swap.host_slots_total, swap.host_slots_free
    pb.swaps_out, pb.swaps_in = swap.swaps_out, swap.swaps_in
    pb.swap_bytes_out, pb.swap_bytes_in = swap.bytes_out, swap.bytes_in
    pb.swaps_in_flight = swap.in_flight_out + swap.in_flight_in
    pb.swaps_in_flight_out, pb.swap_blocked_ns = swap.in_flight_out, swap.blocked_ns


# --- scheduler -> stage


def control_message_to_wire(message: ControlMessage) -> bytes:
    pb = stage_pb2.ControlMessage()
    match message:
        case WirePlan():
            _fill_plan(pb.plan, message)
        case Configure(epoch, next_stage_address):
            pb.configure.epoch, pb.configure.next_stage_address = epoch, next_stage_address
        case Measure(profile_id, epoch, points):
            pb.profile.profile_id, pb.profile.epoch = profile_id, epoch
            for point in points:
                pb.profile.points.add(
                    num_sequences=point.num_sequences,
                    new_tokens=point.new_tokens,
                    context_tokens=point.context_tokens,
                )
    return pb.SerializeToString()


def _fill_plan(pb: stage_pb2.IterationPlan, plan: WirePlan) -> None:
    pb.seq, pb.epoch = plan.seq, plan.epoch
    for item in plan.items:
        _fill_item(pb.items.add(), item)
    pb.host_generation = plan.host_generation
    for swap in plan.swaps:
        pb.swaps.add(
            swap_id=swap.swap_id,
            job_id=swap.job_id,
            direction=stage_pb2.SWAP_DIRECTION_OUT if swap.out else stage_pb2.SWAP_DIRECTION_IN,
            device_blocks=swap.device_blocks,
            host_slots=swap.host_slots,
        )


def _fill_item(pb: stage_pb2.PlanItem, item: WireItem) -> None:
    pb.job_id = item.job_id
    pb.start = item.start
    pb.num_tokens = item.num_tokens
    pb.block_table = item.block_table
    pb.token_ids = item.token_ids
    if not item.sample:
        return
    pb.sample = True
    pb.output_position = item.output_position
    if item.sampling:
        pb.sampling.ParseFromString(item.sampling)
    if item.suppressed:
        pb.suppressed_token_ids = item.suppressed
    pb.penalty_prompt_ids, pb.penalty_output_ids = item.history


# --- stage -> scheduler


def stage_message_from_wire(data: bytes) -> StageMessage:
    pb = _parse(stage_pb2.StageMessage, data)
    match pb.WhichOneof("message"):
        case "iteration":
            return _report_from_pb(pb.iteration)
        case "swap":
            swap = pb.swap
            return SwapReport(swap.swap_id, swap.epoch, swap.stage, swap.bytes, swap.copy_ns, swap.error, swap.begin_ns)
        case "ready":
            return _ready_from_pb(pb.ready)
        case "host":
            return HostArena(pb.host.generation, pb.host.num_slots, pb.host.node)
        case "fault":
            return Fault(pb.fault.seq, pb.fault.epoch, pb.fault.message)
        case "profile":
            return Measured(pb.profile.profile_id, pb.profile.stage, tuple(pb.profile.compute_ns))
        case _:
            return UnknownMessage()


def _report_from_pb(pb: stage_pb2.IterationReport) -> Report:
    return Report(
        seq=pb.seq,
        epoch=pb.epoch,
        stage=pb.stage,
        compute_ns=pb.compute_ns,
        total_compute_ns=pb.total_compute_ns,
        token_ids=unpack_u32(pb.token_ids),
        logprobs=tuple([entry.SerializeToString() for entry in pb.logprobs]),
        begin_ns=pb.begin_ns,
        wait_ns=pb.wait_ns,
    )


def _ready_from_pb(pb: stage_pb2.StageReady) -> Ready:
    return Ready(
        epoch=pb.epoch,
        stage=pb.stage,
        num_stages=pb.num_stages,
        num_blocks=pb.num_blocks,
        block_size=pb.block_size,
        max_model_len=pb.max_model_len,
        vocab_size=pb.vocab_size,
        fingerprint=pb.model_fingerprint,
        kv_block_bytes=pb.kv_block_bytes,
        device=pb.device,
        dtype=pb.dtype,
        host=HostArena(pb.host_generation, pb.num_host_slots, pb.host_node),
    )


def _parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a {kind.DESCRIPTOR.full_name}: {error}") from error
