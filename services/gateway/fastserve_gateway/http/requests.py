"""What the HTTP API accepts, field by field. A field that is not listed is refused by name, never ignored.

Types are strict (the string "5" is no number). Ranges are stated here for the OpenAPI document with the same
constants that request.py enforces.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from fastserve_gateway import limits
from fastserve_gateway.http.unsupported import UNSUPPORTED, UNSUPPORTED_CHAT, Neutral
from fastserve_gateway.request import RequestFields


def _unsupported(name: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported_field", "{param} is not supported", {"param": name})


def _is_ids(value: list[object]) -> bool:
    return all(type(item) is int for item in value)


def _prompt(value: object) -> str | list[str] | list[int] | list[list[int]]:
    """By hand: pydantic's union would list an error for each of a million wrong items."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if not value or _is_ids(value):
            return value
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and _is_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt_type", "must be a string, a list of strings, token ids, or a list of token-id lists"
    )


#: Marks a token id in the OpenAPI document, where the served model's vocabulary becomes its maximum.
TOKEN_ID_MARK = "x-token-id"

_TOKEN_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": limits.UINT32_MAX, TOKEN_ID_MARK: True}
_IDS_SCHEMA = {"type": "array", "items": _TOKEN_ID_SCHEMA, "minItems": 1}
TokenId = Annotated[int, Field(ge=0, le=limits.UINT32_MAX, json_schema_extra={TOKEN_ID_MARK: True})]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": limits.MAX_SEQUENCES,
                },
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": limits.MAX_SEQUENCES},
            ]
        }
    ),
]

#: One wrong item is told; a million wrong items are not listed.
_FAIL_FAST = Field(fail_fast=True)

Real = Annotated[float, Field(allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_CHARS)]
Count = Annotated[int, Field(ge=1, le=limits.UINT32_MAX)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    #: A last event with the usage of the whole request.
    include_usage: bool | None = None
    #: The usage so far on every event.
    continuous_usage_stats: bool | None = None


class _Generation(_Strict):
    """Fields that completions and chat share."""

    unsupported: ClassVar[Neutral] = {}

    model: str | None = None
    n: int | None = Field(None, ge=1, le=limits.MAX_SEQUENCES)
    best_of: int | None = Field(None, description="Only the value of `n` is supported.")
    max_tokens: Count | None = None
    min_tokens: int | None = Field(None, ge=0, le=limits.UINT32_MAX)
    temperature: Real | None = Field(None, ge=0, le=limits.MAX_TEMPERATURE)
    top_p: Real | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=limits.UINT32_MAX)
    min_p: Real | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=limits.INT64_MIN, le=limits.INT64_MAX)
    presence_penalty: Real | None = Field(None, ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)
    frequency_penalty: Real | None = Field(None, ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)
    repetition_penalty: Real | None = Field(None, gt=0, le=limits.MAX_REPETITION_PENALTY)
    logit_bias: dict[str, Real] | None = Field(
        None, max_length=limits.MAX_LOGIT_BIAS_ENTRIES, description="Token id, as a string, to bias."
    )
    stop: Stop | Annotated[list[Stop], _FAIL_FAST] | None = Field(
        None, json_schema_extra={"maxItems": limits.MAX_STOP_STRINGS}
    )
    stop_token_ids: Annotated[list[TokenId], _FAIL_FAST] | None = Field(None, max_length=limits.MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=limits.INT32_MIN, le=limits.INT32_MAX)
    expected_output_tokens: int | None = Field(
        None, ge=0, le=limits.UINT32_MAX, description="A guess of the answer's length; 0: none."
    )
    program: str | None = Field(
        None, max_length=limits.MAX_PROGRAM_CHARS, description="Name that all requests of one agent share."
    )
    request_id: str | None = Field(None, max_length=limits.MAX_REQUEST_ID_CHARS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: object) -> object:
        """Drop neutral values of unsupported fields; refuse every other one."""
        if not isinstance(values, dict):
            return values
        kept = dict(values)
        for name in values.keys() & cls.unsupported.keys():
            value = kept.pop(name)
            if name == "user" and isinstance(value, str):
                continue  # a label for the caller's own records
            if not any(value == neutral and type(value) is type(neutral) for neutral in cls.unsupported[name]):
                raise _unsupported(name)
        return kept

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _unsupported("best_of")
        if self.stream_options is not None and not self.stream:
            message = "{param} is only allowed when stream is true"
            raise PydanticCustomError("stream_options", message, {"param": "stream_options"})
        return self

    @model_validator(mode="after")
    def _check_bias_keys(self) -> Self:
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                message = "{param} has a key that is not a token id"
                raise PydanticCustomError("logit_bias_key", message, {"param": "logit_bias"})
        return self

    def _shared(self, request_id: str | None) -> RequestFields:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return RequestFields(
            prompts=(),
            request_id=self.request_id or request_id,
            model=self.model,
            n=self.n,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(key): value for key, value in (self.logit_bias or {}).items()},
            stop=stops or (),
            stop_token_ids=self.stop_token_ids or (),
            include_stop=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            priority=self.priority,
            expected_output_tokens=self.expected_output_tokens,
            program=self.program,
        )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(_Generation):
    unsupported: ClassVar[Neutral] = UNSUPPORTED

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=limits.MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.logprobs is not None:
            message = "{param} together with echo is not supported: prompt tokens have no log-probabilities here"
            raise PydanticCustomError("echo_logprobs", message, {"param": "logprobs"})
        return self

    def fields(self, request_id: str | None) -> RequestFields:
        """`request_id`: used when the body has none."""
        return replace(
            self._shared(request_id),
            prompts=_prompts(self.prompt),
            add_special_tokens=self.add_special_tokens is not False,
            max_tokens=self.max_tokens,
            default_max_tokens=limits.DEFAULT_COMPLETION_TOKENS,
            logprobs=self.logprobs,
            echo=bool(self.echo),
        )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The validator saw to it that all items are of one kind."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


#: What client libraries add to an assistant's message; accepted when empty.
_ANSWER_FIELDS = frozenset({"refusal", "tool_calls", "function_call", "audio", "annotations", "reasoning_content"})


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], _FAIL_FAST] | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, values: object) -> object:
        """A client may hand back an earlier answer as its library dumps it."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if not (k in _ANSWER_FIELDS and v in (None, []))}

    def for_template(self) -> dict[str, object]:
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, object] = {"role": self.role, "content": content or ""}
        return message | ({"name": self.name} if self.name is not None else {})


class ChatCompletionRequest(_Generation):
    unsupported: ClassVar[Neutral] = UNSUPPORTED_CHAT

    messages: Annotated[list[ChatMessage], _FAIL_FAST] = Field(min_length=1, max_length=limits.MAX_CHAT_MESSAGES)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=limits.MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = Field(None, max_length=64)

    #: How the fields of RequestFields are called here, where they differ.
    field_names: ClassVar[dict[str, str]] = {"prompt": "messages", "logprobs": "top_logprobs"}

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            message = "{param} is only allowed when logprobs is true"
            raise PydanticCustomError("top_logprobs", message, {"param": "top_logprobs"})
        return self

    def fields(self, prompt: str, request_id: str | None) -> RequestFields:
        """`prompt`: the messages, rendered. `request_id`: used when the body has none."""
        return replace(
            self._shared(request_id),
            prompts=[prompt],
            # A chat template spells out the special tokens itself.
            add_special_tokens=bool(self.add_special_tokens),
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class TokenizeRequest(_Strict):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], _FAIL_FAST] | None = Field(
        None, min_length=1, max_length=limits.MAX_CHAT_MESSAGES
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = Field(None, max_length=64)
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt_or_messages", "give either {param} or messages", {"param": "prompt"})
        return self


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], _FAIL_FAST]
