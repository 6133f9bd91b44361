"""Public gRPC messages <-> domain."""

from collections.abc import Iterable

from fastserve.v1 import inference_pb2, sampling_pb2
from fastserve_common.errors import InvalidArgumentError
from fastserve_gateway.engine.events import Delta, Finish, FinishReason, PlacedLogprob, Usage
from fastserve_gateway.request import RequestFields

#: How RequestFields are called here, where they differ.
FIELD_NAMES = {
    "n": "sampling.num_sequences",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "seed": "sampling.seed",
    "presence_penalty": "decoding.presence_penalty",
    "frequency_penalty": "decoding.frequency_penalty",
    "repetition_penalty": "decoding.repetition_penalty",
    "logit_bias": "decoding.logit_bias",
    "max_tokens": "stopping.max_new_tokens",
    "min_tokens": "stopping.min_new_tokens",
    "stop_token_ids": "stopping.stop_token_ids",
    "stop": "stopping.stop_strings",
    "logprobs": "response.logprobs",
    "delivered": "delivered.ids",
}

_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORTED,
}


def fields_from_wire(message: inference_pb2.GenerateRequest) -> RequestFields:
    """Raises InvalidArgumentError when there is no prompt."""
    sampling, decoding, stopping = message.sampling, message.decoding, message.stopping
    return RequestFields(
        prompts=[_prompt(message)],
        request_id=message.request_id or None,
        model=message.model or None,
        n=sampling.num_sequences or None,
        max_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
        min_tokens=stopping.min_new_tokens,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        presence_penalty=decoding.presence_penalty,
        frequency_penalty=decoding.frequency_penalty,
        repetition_penalty=decoding.repetition_penalty if decoding.HasField("repetition_penalty") else None,
        logit_bias=dict(decoding.logit_bias),
        logprobs=message.response.logprobs if message.response.HasField("logprobs") else None,
        stop=list(stopping.stop_strings),
        stop_token_ids=list(stopping.stop_token_ids),
        include_stop=stopping.include_stop_strings,
        ignore_eos=stopping.ignore_eos,
        echo=message.response.echo,
        priority=message.priority,
        expected_output_tokens=message.expected_output_tokens,
        program=message.program,
        delivered=list(message.delivered.ids),
    )


def _prompt(message: inference_pb2.GenerateRequest) -> str | list[int]:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            raise InvalidArgumentError("a prompt is required: text or token_ids", param="prompt")


def output_to_wire(delta: Delta, echo: str = "") -> inference_pb2.SequenceOutput:
    output = inference_pb2.SequenceOutput(
        index=delta.index,
        text=echo + delta.text,
        token_ids=delta.token_ids,
        logprobs=map(_logprob_to_wire, delta.logprobs),
    )
    if delta.finish is not None:
        output.finish_info.CopyFrom(_finish_to_wire(delta.finish))
    return output


def merge_outputs(pieces: Iterable[inference_pb2.SequenceOutput]) -> inference_pb2.SequenceOutput:
    """One answer's pieces, whole."""
    pieces = list(pieces)
    whole = inference_pb2.SequenceOutput(index=pieces[0].index, text="".join(piece.text for piece in pieces))
    for piece in pieces:
        whole.token_ids.extend(piece.token_ids)
        whole.logprobs.extend(piece.logprobs)
    whole.finish_info.CopyFrom(pieces[-1].finish_info)
    return whole


def usage_to_wire(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


def _finish_to_wire(finish: Finish) -> inference_pb2.FinishInfo:
    info = inference_pb2.FinishInfo(reason=_FINISH_REASONS[finish.reason])
    if finish.stop_string is not None:
        info.stop_string = finish.stop_string
    elif finish.stop_token_id is not None:
        info.stop_token_id = finish.stop_token_id
    return info


def _logprob_to_wire(placed: PlacedLogprob) -> sampling_pb2.TokenLogprobs:
    entry = placed.entry
    top = [sampling_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return sampling_pb2.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)
