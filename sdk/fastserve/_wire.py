"""Between the client's values and the generated messages: the only place that knows the messages' fields."""

import uuid
from collections.abc import Iterable, Iterator

from fastserve.errors import InvalidRequestError
from fastserve.types import (
    Answer,
    Chunk,
    Finish,
    FinishReason,
    GenerateOptions,
    Generation,
    ModelInfo,
    Prompt,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from fastserve.v1 import inference_pb2 as pb
from fastserve.v1 import sampling_pb2

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def to_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request without its id. Raises InvalidRequestError for a value that does not fit its field's type."""
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        raise InvalidRequestError(f"unknown option {unknown[0]!r}")
    try:
        request = pb.GenerateRequest(
            model=options.get("model", ""),
            temperature=options.get("temperature"),
            sampling=_sampling(options),
            decoding=_decoding(options),
            stopping=_stopping(options),
            response=pb.ResponseOptions(logprobs=options.get("logprobs"), echo=options.get("echo", False)),
            priority=options.get("priority", 0),
            expected_output_tokens=options.get("expected_output_tokens", 0),
            program=options.get("program", ""),
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the prompt or an option has a value that cannot be sent: {error}") from error
    return request


def _sampling(options: GenerateOptions) -> pb.Sampling:
    return pb.Sampling(
        num_sequences=options.get("n", 1),
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p"),
        min_p=options.get("min_p", 0.0),
        seed=options.get("seed"),
    )


def _decoding(options: GenerateOptions) -> pb.Decoding:
    return pb.Decoding(
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        repetition_penalty=options.get("repetition_penalty"),
        logit_bias=options.get("logit_bias", {}),
    )


def _stopping(options: GenerateOptions) -> pb.Stopping:
    stop = options.get("stop", ())
    return pb.Stopping(
        max_new_tokens=options.get("max_tokens"),
        min_new_tokens=options.get("min_tokens", 0),
        stop_token_ids=options.get("stop_token_ids", ()),
        stop_strings=[stop] if isinstance(stop, str) else stop,
        include_stop_strings=options.get("include_stop", False),
        ignore_eos=options.get("ignore_eos", False),
    )


class Delivered:
    """The ids of a stream so far, to go on behind them through another gateway."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._ended = False

    def add(self, response: pb.GenerateResponse) -> None:
        for output in response.outputs:
            self._ids.extend(output.token_ids)
            self._ended |= output.HasField("finish_info")

    def resume(self, request: pb.GenerateRequest) -> bool:
        """Make `request` ask for the rest. False when it cannot: several answers, or nothing is left."""
        if request.sampling.num_sequences > 1 or self._ended or not self._ids:
            return False
        request.delivered.ids[:] = self._ids
        request.response.echo = False
        return True


def to_generation(response: pb.GenerateResponse) -> Generation:
    answers = [
        Answer(
            index=output.index,
            text=output.text,
            token_ids=tuple(output.token_ids),
            finish=_finish(output.finish_info),
            logprobs=_logprobs(output.logprobs),
        )
        for output in response.outputs
    ]
    return Generation(response.request_id, tuple(sorted(answers, key=lambda a: a.index)), _usage(response.usage))


def to_chunks(response: pb.GenerateResponse) -> Iterator[Chunk]:
    """One chunk per answer that the message adds to; one empty chunk when it carries only counts."""
    prompt_tokens = response.prompt_info.num_prompt_tokens if response.HasField("prompt_info") else None
    usage = _usage(response.usage) if response.HasField("usage") else None
    outputs = list(response.outputs)
    if not outputs and (prompt_tokens is not None or usage is not None):
        outputs = [pb.SequenceOutput()]
    for position, output in enumerate(outputs):
        yield Chunk(
            request_id=response.request_id,
            index=output.index,
            text=output.text,
            token_ids=tuple(output.token_ids),
            logprobs=_logprobs(output.logprobs),
            finish=_finish(output.finish_info) if output.HasField("finish_info") else None,
            prompt_tokens=prompt_tokens if position == 0 else None,
            usage=usage if position == len(outputs) - 1 else None,
        )


def to_model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=response.model,
        root=response.root,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        num_stages=response.num_stages,
        policy=response.policy,
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens)


def _finish(info: pb.FinishInfo) -> Finish:
    cause = info.WhichOneof("stop_cause")
    return Finish(
        reason=_REASONS.get(info.reason, "error"),
        stop_token_id=info.stop_token_id if cause == "stop_token_id" else None,
        stop_string=info.stop_string if cause == "stop_string" else None,
    )


def _logprobs(entries: Iterable[sampling_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(e.token_id, e.logprob, tuple(TopLogprob(t.token_id, t.logprob) for t in e.top)) for e in entries
    )
