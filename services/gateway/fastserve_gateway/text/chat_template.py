"""Chat templates: the Jinja dialect that Hugging Face models ship, in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastserve_common.errors import InvalidArgumentError
from fastserve_gateway.text.files import ModelFilesError


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`: the conversation is not one the model knows."""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks assistant text for training; in serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models never saw in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[[str], str]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelFilesError when the template does not parse."""
        try:
            self._template: Template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelFilesError(f"the chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. Raises InvalidArgumentError when the template refuses these messages."""
        context: dict[str, object] = {**self._special_tokens, "tools": None, "documents": None, **(variables or {})}
        context.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(context)
        except RecursionError as error:
            raise InvalidArgumentError("the messages are nested too deeply", param="messages") from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidArgumentError(f"the chat template refused the messages: {error}", param="messages") from error
