"""What the clients take and give. Plain frozen values: nothing here knows the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "abort", "error"]

#: Text, or token ids of the served model's vocabulary.
Prompt = str | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. Whatever is left out has the server's default."""

    #: Tokens to generate at most. Default: whatever fits the model's length.
    max_tokens: int
    #: No end-of-sequence or stop token before this many tokens. Default 0.
    min_tokens: int
    #: 0 is greedy. Default 1.0.
    temperature: float
    #: 0 is off. Default 0.
    top_k: int
    #: In (0, 1]. Default 1.0.
    top_p: float
    #: In [0, 1]. Default 0.
    min_p: float
    #: Same seed, same prompt, same options: same answer, however often the request is preempted. Default: random.
    seed: int
    #: Independent answers. Default 1.
    n: int
    #: Added once per token that already occurred, in [-2, 2]. Default 0.
    presence_penalty: float
    #: Added per occurrence, in [-2, 2]. Default 0.
    frequency_penalty: float
    #: Divides the logits of tokens that occurred; 1 is off. Default 1.0.
    repetition_penalty: float
    #: Token id -> added to its logit.
    logit_bias: Mapping[int, float]
    #: Strings that end the answer.
    stop: str | Sequence[str]
    #: Token ids that end the answer.
    stop_token_ids: Sequence[int]
    #: Keep the stop string in the text. Default False.
    include_stop: bool
    #: Go on after an end-of-sequence token. Default False.
    ignore_eos: bool
    #: Return each token's log-probability and those of this many most likely tokens. Default: none.
    logprobs: int
    #: Begin the text with the prompt. Default False.
    echo: bool
    #: Lower runs earlier, under policies that use it. Default 0.
    priority: int
    #: A guess of the answer's length, for policies that use it; 0 is none. Default 0.
    expected_output_tokens: int
    #: Name that all requests of one agent share, for policies that use it. Default: none.
    program: str
    #: Must name the served model. Default: whichever is served.
    model: str
    #: Unique among live requests. Default: chosen by the client; see `request_id` of the result.
    request_id: str


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one generated token; `top`: the most likely ones at its position, most likely first."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """In tokens. `completion_tokens` counts all n answers."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended. At most one of `stop_token_id` and `stop_string` is set, and only for `stop`."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the n answers, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` returns. `answers` are ordered by index; the properties are those of the first."""

    request_id: str
    answers: tuple[Answer, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.answers[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.answers[0].finish


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one answer. The texts of one index, in order, add up to the answer's text.

    `text` can be empty: a token may be held back until its character is complete. `finish` is set on an answer's
    last chunk, `prompt_tokens` on the stream's first one, `usage` on the stream's last one.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    prompt_tokens: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """`max_model_len`: the longest prompt + answer accepted, in tokens. `root`: the hub id or folder it came from."""

    model: str
    root: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_stages: int
    policy: str
