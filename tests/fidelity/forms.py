"""Every way to ask for an answer, each giving the same kind of `Result`."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.gateway.rig import parse_events

from fastserve.types import Chunk, TokenLogprobs

from .case import Case, Logprobs, Result, Seen
from .cluster import Cluster
from .oracle import EOS

Ask = Callable[[Cluster, Case], Awaitable[Result]]

#: The HTTP names of options that the client library spells differently.
_HTTP_NAMES = {"include_stop": "include_stop_str_in_output"}


def _body(case: Case) -> dict[str, object]:
    options: dict[str, object] = {_HTTP_NAMES.get(name, name): value for name, value in case.options.items()}
    if "logit_bias" in case.options:
        options["logit_bias"] = {str(key): value for key, value in case.options["logit_bias"].items()}
    return {"prompt": case.prompt, **options}


async def http_whole(cluster: Cluster, case: Case) -> Result:
    response = await cluster.http.post("/v1/completions", json=_body(case))
    assert response.status_code == 200, response.text
    return _of_choices(response.json()["choices"], response.json()["usage"])


async def http_stream(cluster: Cluster, case: Case) -> Result:
    body = {**_body(case), "stream": True, "stream_options": {"include_usage": True}}
    async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        raw = await response.aread()
    assert response.status_code == 200, raw
    *events, last = parse_events(raw)
    assert last["choices"] == []
    whole: dict[int, dict[str, Any]] = {}
    for event in events:
        assert event["usage"] is None
        for choice in event["choices"]:
            _append(whole, choice, asked="logprobs" in case.options)
    return _of_choices([whole[index] for index in sorted(whole)], last["usage"])


def _append(whole: dict[int, dict[str, Any]], choice: dict[str, Any], *, asked: bool) -> None:
    known = whole.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
    assert known["finish_reason"] is None, "an event behind the last one"
    known["text"] += choice["text"]
    known["finish_reason"], known["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    if asked and known["logprobs"] is None:
        known["logprobs"] = {"token_logprobs": [], "top_logprobs": []}
    if choice["logprobs"] is not None:
        known["logprobs"]["token_logprobs"] += choice["logprobs"]["token_logprobs"]
        known["logprobs"]["top_logprobs"] += choice["logprobs"]["top_logprobs"] or []


def _of_choices(choices: list[dict[str, Any]], usage: Mapping[str, int]) -> Result:
    answers = [
        Seen(
            choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
            logprobs=None if choice["logprobs"] is None else _of_lists(choice["logprobs"]),
        )
        for choice in choices
    ]
    return Result(answers, usage["prompt_tokens"], usage["completion_tokens"])


def _of_lists(logprobs: dict[str, Any]) -> Logprobs:
    values = logprobs["token_logprobs"]
    tops = logprobs["top_logprobs"] or [{}] * len(values)
    return [(value, sorted(top.values(), reverse=True)) for value, top in zip(values, tops, strict=True)]


async def grpc_whole(cluster: Cluster, case: Case) -> Result:
    generation = await cluster.sdk.generate(case.prompt, **case.options)
    answers = [
        Seen(
            answer.text,
            answer.finish.reason,
            _stop(answer.finish.stop_token_id, answer.finish.stop_string),
            list(answer.token_ids),
            _of_entries(answer.logprobs, asked="logprobs" in case.options),
        )
        for answer in generation.answers
    ]
    return Result(answers, generation.usage.prompt_tokens, generation.usage.completion_tokens)


async def grpc_stream(cluster: Cluster, case: Case) -> Result:
    whole: dict[int, Seen] = {}
    prompt_tokens = completion_tokens = 0
    asked = "logprobs" in case.options
    async with cluster.sdk.stream(case.prompt, **case.options) as stream:
        async for chunk in stream:
            _add(whole.setdefault(chunk.index, Seen("", "", None, [], [] if asked else None)), chunk)
            prompt_tokens = chunk.prompt_tokens or prompt_tokens
            completion_tokens = chunk.usage.completion_tokens if chunk.usage else completion_tokens
    return Result([whole[index] for index in sorted(whole)], prompt_tokens, completion_tokens)


def _add(seen: Seen, chunk: Chunk) -> None:
    assert not seen.finish, "a chunk behind the last one"
    assert seen.token_ids is not None
    seen.text += chunk.text
    seen.token_ids += chunk.token_ids
    logprobs = _of_entries(chunk.logprobs, asked=seen.logprobs is not None)
    seen.logprobs = None if seen.logprobs is None else seen.logprobs + (logprobs or [])
    if chunk.finish is not None:
        seen.finish = chunk.finish.reason
        seen.stop = _stop(chunk.finish.stop_token_id, chunk.finish.stop_string)


def _stop(token_id: int | None, string: str | None) -> int | str | None:
    """As HTTP says it: end-of-sequence is no reason of its own."""
    return string if token_id is None or token_id in EOS else token_id


def _of_entries(entries: tuple[TokenLogprobs, ...], *, asked: bool) -> Logprobs | None:
    assert asked or not entries, "log-probabilities that nobody asked for"
    return [(entry.logprob, [top.logprob for top in entry.top]) for entry in entries] if asked else None


FORMS: Mapping[str, Ask] = {
    "HTTP": http_whole,
    "HTTP stream": http_stream,
    "gRPC": grpc_whole,
    "gRPC stream": grpc_stream,
}
