"""Requests that use every option of the sampler and of stopping."""

from tests.gateway.models import END

from fastserve.types import GenerateOptions

from .case import Case
from .oracle import Oracle

PROMPT = "The queue was long, and everybody in it knew why."
N = 14


def all_cases(oracle: Oracle) -> list[Case]:
    """Each one with draws that rounding cannot decide."""
    return [oracle.settled(case) for case in [*_drawn(), *_stopped(oracle)]]


def _drawn() -> list[Case]:
    hot: GenerateOptions = {"temperature": 0.9, "seed": 7, "max_tokens": N}
    return [
        Case("greedy", PROMPT, {"temperature": 0, "max_tokens": N}),
        Case("temperature", PROMPT, {**hot}),
        Case("top-p", PROMPT, {**hot, "top_p": 0.8}),
        Case("top-k", PROMPT, {**hot, "top_k": 5}),
        Case("min-p", PROMPT, {**hot, "min_p": 0.1}),
        Case("filters together", PROMPT, {**hot, "top_k": 40, "top_p": 0.9, "min_p": 0.02}),
        Case("repetition penalty", PROMPT, {**hot, "repetition_penalty": 1.5}),
        Case(
            "greedy with every penalty",
            PROMPT,
            {
                "temperature": 0,
                "max_tokens": N,
                "repetition_penalty": 1.3,
                "presence_penalty": 0.7,
                "frequency_penalty": 0.4,
            },
        ),
        Case("presence and frequency", PROMPT, {**hot, "presence_penalty": 1.5, "frequency_penalty": -0.5}),
        Case("bias", PROMPT, {**hot, "logit_bias": {65: 6.0, 66: 5.0, 97: -100.0}}),
        Case("log-probabilities", PROMPT, {**hot, "logprobs": 5}),
        Case("log-probabilities of the chosen only", PROMPT, {"temperature": 0, "max_tokens": N, "logprobs": 0}),
        Case("three answers", PROMPT, {**hot, "n": 3, "logprobs": 2}),
        Case("one token", PROMPT, {"temperature": 0, "max_tokens": 1}),
    ]


def _stopped(oracle: Oracle) -> list[Case]:
    hot: GenerateOptions = {"temperature": 0.9, "seed": 11, "max_tokens": N}
    ends: GenerateOptions = {"logit_bias": {END: 9.0}, **hot}
    to_stop = oracle.settled(Case("to find stops in", PROMPT, {**hot}))
    hot = to_stop.options
    whole = oracle.result(to_stop).answers[0]
    assert whole.token_ids is not None
    stop_id = whole.token_ids[6]
    at = next(k for k in range(3, len(whole.text) - 2) if "\ufffd" not in whole.text[k : k + 2])
    stop = whole.text[at : at + 2]
    return [
        Case("end of sequence", PROMPT, {**ends}),
        Case("end of sequence ignored", PROMPT, {**ends, "ignore_eos": True}),
        Case("end of sequence not before", PROMPT, {**ends, "min_tokens": 8}),
        Case("stop token", PROMPT, {**hot, "stop_token_ids": [stop_id]}),
        Case("stop token, shown", PROMPT, {**hot, "stop_token_ids": [stop_id], "include_stop": True}),
        Case("stop string", PROMPT, {**hot, "stop": [stop, "never there"]}),
        Case(
            "stop string, shown, with log-probabilities",
            PROMPT,
            {**hot, "stop": stop, "include_stop": True, "logprobs": 1},
        ),
    ]
