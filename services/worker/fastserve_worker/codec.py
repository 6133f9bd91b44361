"""Between the wire and this service's own messages; the only file here that reads or builds generated types."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from fastserve.v1 import kvstore_pb2, sampling_pb2, stage_pb2
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_common.state import DEFAULT_GROUP, rank_member
from fastserve_worker.errors import PlanError
from fastserve_worker.messages import (
    ActivationPart,
    Activations,
    Computed,
    KvShape,
    Plan,
    PlanRow,
    ProfilePoint,
    StageInfo,
    SwapDirection,
    SwapOrder,
)
from fastserve_worker.sampling.params import DrawParams, TokenDraw
from fastserve_worker.swap.copier import Copy
from fastserve_worker.swap.host_slab import HostSlab

#: Activations are cut into pieces of this size, far below the message cap, so that a plan or a report waits behind
#: one piece at most.
ACTIVATION_CHUNK_BYTES = 1024 * 1024

#: Sampling parameters that are kept decoded: every token of a request comes with the same ones.
MAX_KNOWN_SAMPLINGS = 4096

_Sampling = tuple[float, int, float, float, int, float, float, float, Mapping[int, float], int | None]


def decode_plan(message: stage_pb2.IterationPlan, info: StageInfo) -> Plan:
    """Raises PlanError for a plan that is malformed or does not fit this stage."""
    plan = Plan(
        message.seq,
        message.epoch,
        tuple([_decode_row(item) for item in message.items]),
        tuple([_decode_swap(swap) for swap in message.swaps]),
        message.host_generation,
    )
    if plan.num_tokens > info.num_blocks * info.block_size:
        raise PlanError(f"{plan.num_tokens} tokens are more than the whole pool of {info.num_blocks} blocks holds")
    for row in plan.rows:
        _check_row(row, info)
    _check_swaps(plan, info)
    return plan


def _decode_row(item: stage_pb2.PlanItem) -> PlanRow:
    draw = _decode_draw(item) if item.sample else None
    return PlanRow(item.job_id, item.start, item.num_tokens, item.block_table, item.token_ids, draw)


def _check_row(row: PlanRow, info: StageInfo) -> None:
    end = row.start + row.num_tokens
    num_blocks = -(-end // info.block_size)
    if row.num_tokens < 1:
        raise PlanError(f"job {row.job_id}: a row needs at least one token")
    if end > info.max_model_len:
        raise PlanError(f"job {row.job_id}: {end} tokens are above the model length of {info.max_model_len}")
    if info.is_first and len(row.token_ids) != 4 * row.num_tokens:
        raise PlanError(f"job {row.job_id}: {row.num_tokens} tokens, but {len(row.token_ids)} bytes of token ids")
    if len(row.block_table) % 4 or len(row.block_table) < 4 * num_blocks:
        raise PlanError(
            f"job {row.job_id}: {end} tokens need {num_blocks} blocks, table has {len(row.block_table)} bytes"
        )


def _decode_draw(item: stage_pb2.PlanItem) -> DrawParams:
    return DrawParams(
        item.output_position,
        *decode_sampling(item.sampling.SerializeToString()),
        item.suppressed_token_ids,
        item.penalty_prompt_ids,
        item.penalty_output_ids,
    )


@lru_cache(MAX_KNOWN_SAMPLINGS)
def decode_sampling(encoded: bytes) -> _Sampling:
    """In the order of the fields of DrawParams. Fields left at the wire's zero mean "off" where zero itself would make
    no sense (top_p, repetition_penalty)."""
    params = sampling_pb2.SamplingParams.FromString(encoded)
    return (
        params.temperature,
        params.top_k,
        params.top_p or 1.0,
        params.min_p,
        params.seed,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty or 1.0,
        dict(params.logit_bias),
        params.logprobs if params.HasField("logprobs") else None,
    )


_DIRECTIONS = {stage_pb2.SWAP_DIRECTION_OUT: SwapDirection.OUT, stage_pb2.SWAP_DIRECTION_IN: SwapDirection.IN}


def _decode_swap(swap: stage_pb2.SwapOp) -> SwapOrder:
    direction = _DIRECTIONS.get(swap.direction)
    if direction is None:
        raise PlanError(f"swap {swap.swap_id}: it says neither out nor in")
    if len(swap.device_blocks) % 4 or len(swap.host_slots) != len(swap.device_blocks):
        raise PlanError(
            f"swap {swap.swap_id}: {len(swap.device_blocks)} bytes of blocks, {len(swap.host_slots)} of slots"
        )
    blocks, slots = tuple(unpack_u32(swap.device_blocks)), tuple(unpack_u32(swap.host_slots))
    return SwapOrder(swap.swap_id, swap.job_id, direction, blocks, slots)


def _check_swaps(plan: Plan, info: StageInfo) -> None:
    """Blocks that a plan computes with cannot leave in it: the copy would see them half written."""
    if not plan.swaps:
        return
    in_use = {block for row in plan.rows for block in unpack_u32(row.block_table)}
    for order in plan.swaps:
        if any(block >= info.num_blocks for block in order.device_blocks):
            raise PlanError(f"swap {order.swap_id}: a block outside the pool of {info.num_blocks}")
        if order.direction is SwapDirection.OUT and not in_use.isdisjoint(order.device_blocks):
            raise PlanError(f"swap {order.swap_id}: it takes out blocks that its own plan computes with")


def strip_token_ids(plan: stage_pb2.IterationPlan) -> None:
    """What the next stage gets: it works on activations. Changes `plan`."""
    for item in plan.items:
        item.ClearField("token_ids")


def forward_hello(epoch: int, from_stage: int) -> stage_pb2.ForwardMessage:
    return stage_pb2.ForwardMessage(hello=stage_pb2.ForwardHello(epoch=epoch, from_stage=from_stage))


def forward_plan(plan: stage_pb2.IterationPlan) -> stage_pb2.ForwardMessage:
    return stage_pb2.ForwardMessage(plan=plan)


def forward_activations(seq: int, epoch: int, activations: Activations) -> Iterator[stage_pb2.ForwardMessage]:
    """Chunks in order; a tensor without tokens is one chunk without bytes. Only one chunk's copy lives at a time."""
    view = memoryview(activations.data)
    for offset in range(0, max(len(view), 1), ACTIVATION_CHUNK_BYTES):
        chunk = stage_pb2.ActivationChunk(
            seq=seq,
            epoch=epoch,
            dtype=activations.dtype,
            shape=activations.shape,
            offset=offset,
            data=bytes(view[offset : offset + ACTIVATION_CHUNK_BYTES]),
            compute_ns=activations.compute_ns,
        )
        yield stage_pb2.ForwardMessage(activations=chunk)


def decode_part(chunk: stage_pb2.ActivationChunk) -> ActivationPart:
    return ActivationPart(
        chunk.seq, chunk.epoch, chunk.dtype, tuple(chunk.shape), chunk.offset, chunk.data, chunk.compute_ns
    )


def forward_ack(seq: int, epoch: int) -> stage_pb2.ForwardAck:
    return stage_pb2.ForwardAck(seq=seq, epoch=epoch)


def ready(epoch: int, info: StageInfo, host: HostSlab | None) -> stage_pb2.StageMessage:
    return stage_pb2.StageMessage(
        ready=stage_pb2.StageReady(
            epoch=epoch,
            stage=info.stage,
            num_stages=info.num_stages,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            model_fingerprint=info.fingerprint,
            kv_block_bytes=info.kv_block_bytes,
            device=info.device,
            dtype=info.dtype,
            num_host_slots=host.num_slots if host else 0,
            host_generation=host.generation if host else 0,
            host_node=host.node if host else "",
        )
    )


def host_arena(slab: HostSlab | None) -> stage_pb2.StageMessage:
    """None: it swaps with nothing."""
    if slab is None:
        return stage_pb2.StageMessage(host=stage_pb2.HostArena())
    arena = stage_pb2.HostArena(generation=slab.generation, num_slots=slab.num_slots, node=slab.node)
    return stage_pb2.StageMessage(host=arena)


def swap_report(epoch: int, stage: int, copy: Copy) -> stage_pb2.StageMessage:
    report = stage_pb2.SwapReport(
        swap_id=copy.order.swap_id,
        epoch=epoch,
        stage=stage,
        bytes=copy.num_bytes,
        copy_ns=copy.copy_ns,
        begin_ns=copy.begin_ns,
        error=copy.error,
    )
    return stage_pb2.StageMessage(swap=report)


def attach_request(
    info: StageInfo, shape: KvShape, trailer_bytes: int, replica: int = 0, group: str = DEFAULT_GROUP
) -> kvstore_pb2.AttachRequest:
    """`trailer_bytes`: behind the block in every slot, on every stage and rank alike."""
    layout = kvstore_pb2.KvLayout(
        model_fingerprint=info.fingerprint,
        dtype=info.dtype,
        stage=info.stage,
        rank=info.rank,
        num_layers=shape.num_layers,
        block_size=info.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        slot_bytes=shape.block_bytes + trailer_bytes,
    )
    return kvstore_pb2.AttachRequest(
        owner=rank_member(replica, info.stage, info.rank, group),
        layout=layout,
        pipeline_slot_bytes=shape.pipeline_block_bytes + info.num_stages * info.num_ranks * trailer_bytes,
    )


def report(plan: Plan, info: StageInfo, computed: Computed, total_compute_ns: int) -> stage_pb2.StageMessage:
    """`total_compute_ns` and the draws are the last stage's to tell."""
    output = computed.output
    message = stage_pb2.IterationReport(
        seq=plan.seq,
        epoch=plan.epoch,
        stage=info.stage,
        compute_ns=output.compute_ns,
        begin_ns=computed.begin_ns,
        wait_ns=computed.wait_ns,
    )
    if info.is_last:
        message.total_compute_ns = total_compute_ns
        message.token_ids = pack_u32(draw.token_id for draw in output.draws)
        if any(draw.logprob is not None for draw in output.draws):
            message.logprobs.extend(_logprobs(draw) for draw in output.draws)
    return stage_pb2.StageMessage(iteration=message)


def _logprobs(draw: TokenDraw) -> sampling_pb2.TokenLogprobs:
    if draw.logprob is None:
        return sampling_pb2.TokenLogprobs()
    top = [sampling_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in draw.top]
    return sampling_pb2.TokenLogprobs(token_id=draw.token_id, logprob=draw.logprob, top=top)


def fault(seq: int, epoch: int, message: str) -> stage_pb2.StageMessage:
    return stage_pb2.StageMessage(fault=stage_pb2.StageFault(seq=seq, epoch=epoch, message=message))


def decode_points(order: stage_pb2.ProfileOrder) -> tuple[ProfilePoint, ...]:
    return tuple(ProfilePoint(p.num_sequences, p.new_tokens, p.context_tokens) for p in order.points)


def profile_report(profile_id: int, stage: int, compute_ns: list[int]) -> stage_pb2.StageMessage:
    return stage_pb2.StageMessage(
        profile=stage_pb2.ProfileReport(profile_id=profile_id, stage=stage, compute_ns=compute_ns)
    )
