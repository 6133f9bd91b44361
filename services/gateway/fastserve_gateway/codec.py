"""Scheduler wire <-> domain: every conversion is here; the link only moves the messages."""

import time
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum

from fastserve.v1 import sampling_pb2, scheduler_pb2
from fastserve_common.errors import (
    AlreadyExistsError,
    FastServeError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_gateway.engine.events import (
    ClusterView,
    Ended,
    Failed,
    Ids,
    Load,
    StopKind,
    Submission,
    TokenLogprob,
    TokensArrived,
)
from fastserve_gateway.request import ContextLengthError, GenerationRequest

#: Retry hint when the scheduler gives none.
DEFAULT_RETRY_MS = 1000


class CancelReason(Enum):
    CLIENT = scheduler_pb2.CANCEL_REASON_CLIENT
    STOP_STRING = scheduler_pb2.CANCEL_REASON_STOP_STRING


_STOP_KINDS = {
    scheduler_pb2.STOP_REASON_STOP_TOKEN: StopKind.STOP_TOKEN,
    scheduler_pb2.STOP_REASON_LENGTH: StopKind.LENGTH,
    scheduler_pb2.STOP_REASON_CANCELLED: StopKind.CANCELLED,
    scheduler_pb2.STOP_REASON_STOP_STRING: StopKind.CANCELLED,
}

#: Refusals that may pass by themselves: a request that was already running is submitted again.
TRANSIENT_REFUSALS = frozenset(
    {
        scheduler_pb2.REJECT_REASON_NOT_READY,
        scheduler_pb2.REJECT_REASON_DRAINING,
        scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS,
        scheduler_pb2.REJECT_REASON_QUEUE_FULL_TOKENS,
    }
)

#: The scheduler's limits, by the names that vLLM's have in metrics.
_LIMITS = {
    scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS: "max_num_queued_reqs",
    scheduler_pb2.REJECT_REASON_QUEUE_FULL_TOKENS: "max_num_queued_tokens",
}


# --- domain -> scheduler


def hello_to_wire(gateway_id: str) -> scheduler_pb2.GatewayMessage:
    """Asks for batches: one stream message per iteration instead of one per answer."""
    hello = scheduler_pb2.GatewayHello(gateway_id=gateway_id, accepts_batches=True)
    return scheduler_pb2.GatewayMessage(hello=hello)


def submit_to_wire(submission: Submission, received: Ids) -> scheduler_pb2.GatewayMessage:
    """`received`: the ids that this gateway already has; the scheduler does not send them again."""
    message = scheduler_pb2.SubmitRequest(
        request_id=submission.wire_id,
        prompt_token_ids=pack_u32(submission.prompt_ids),
        delivered_token_ids=pack_u32(received),
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        stop_token_ids=sorted(submission.stop_token_ids),
        priority=submission.priority,
        traceparent=submission.traceparent,
        expected_output_tokens=submission.expected_output_tokens,
        program=submission.program,
    )
    message.sampling.ParseFromString(submission.sampling)
    return scheduler_pb2.GatewayMessage(submit=message)


def cancel_to_wire(wire_id: str, reason: CancelReason) -> scheduler_pb2.GatewayMessage:
    return scheduler_pb2.GatewayMessage(cancel=scheduler_pb2.CancelRequest(request_id=wire_id, reason=reason.value))


def sampling_to_wire(request: GenerationRequest, answer: int) -> bytes:
    """Encoded SamplingParams of one answer."""
    sampling = request.sampling
    message = sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=request.seed_of(answer),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
    )
    return message.SerializeToString(deterministic=True)


# --- scheduler -> domain


def parts_of(message: scheduler_pb2.SchedulerMessage) -> Iterable[scheduler_pb2.SchedulerMessage]:
    """What a message says, in order: the messages of a batch, or itself. A batch holds no batches."""
    return message.batch.messages if message.WhichOneof("message") == "batch" else (message,)


def view_from_wire(hello: scheduler_pb2.SchedulerHello, view: ClusterView) -> ClusterView:
    """`view` with what the scheduler says about itself. A limit of 0 is not known yet."""
    bounds = [bound for bound in (hello.max_model_len, hello.max_request_tokens) if bound]
    return replace(
        view,
        generation=hello.generation,
        max_model_len=min(bounds) if bounds else None,
        policy=hello.policy,
        num_stages=hello.num_stages,
    )


def load_from_wire(message: scheduler_pb2.Load) -> Load:
    return Load(message.waiting_prompt_tokens, message.live, max(1, message.pipelines), message.model_fingerprint)


def tokens_from_wire(message: scheduler_pb2.Tokens) -> TokensArrived:
    """Raises ValueError when the ids are not packed uint32 or the log-probabilities are not one per id."""
    ids = unpack_u32(message.token_ids)
    logprobs = tuple(
        TokenLogprob(entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in message.logprobs
    )
    if logprobs and len(logprobs) != len(ids):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(ids)} tokens")
    return TokensArrived(ids, logprobs, time.monotonic())


def ended_from_wire(message: scheduler_pb2.Finished) -> Ended:
    kind = _STOP_KINDS.get(message.reason, StopKind.ERROR)
    return Ended(kind, message.stop_token_id if kind is StopKind.STOP_TOKEN else None)


def failed_from_wire(message: scheduler_pb2.Rejected) -> Failed:
    """A refusal as the error the caller sees."""
    return Failed(_refusal(message), "rejected", _LIMITS.get(message.reason, ""))


def _refusal(message: scheduler_pb2.Rejected) -> FastServeError:
    retry_ms = message.retry_after_ms or DEFAULT_RETRY_MS
    match message.reason:
        case scheduler_pb2.REJECT_REASON_TOO_LONG:
            return ContextLengthError(message.message or "the request can never fit", param="max_tokens")
        case scheduler_pb2.REJECT_REASON_INVALID:
            return InvalidArgumentError(message.message or "the scheduler refused the request")
        case scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS | scheduler_pb2.REJECT_REASON_QUEUE_FULL_TOKENS:
            return ResourceExhaustedError(message.message or "the queue is full", retry_after_ms=retry_ms)
        case scheduler_pb2.REJECT_REASON_DUPLICATE_ID:
            return AlreadyExistsError(message.message or "a request with this id is live")
        case scheduler_pb2.REJECT_REASON_DRAINING:
            return UnavailableError(message.message or "the scheduler is shutting down", retry_after_ms=retry_ms)
        case _:
            return UnavailableError(message.message or "the model is not ready", retry_after_ms=retry_ms)
