"""`fastserve chat`: a conversation over the HTTP chat endpoint, with any OpenAI-compatible server.

A line is a turn, from a terminal or from a pipe. Ctrl-C ends an answer (and aborts it on the server), Ctrl-D the chat.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence

from fastserve._http import HttpClient, HttpError, SseLines
from fastserve.cli.arguments import EXIT_INTERRUPTED, Parser, add_api_key, add_sampling, sampling
from fastserve_common.settings import SettingsError

Message = dict[str, str]

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer."


class ChatError(Exception):
    """The server refused or failed; a sentence."""


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    try:
        http = HttpClient(args.url, {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {})
    except ValueError as error:
        raise SettingsError(f"--url: {error}") from error
    fields: dict[str, object] = {"stream": True, **sampling(args)}
    with asyncio.Runner() as loop:
        try:
            fields["model"] = args.model or loop.run(_first_model(http))
            return _converse(loop, Conversation(http, fields, args.system))
        except (ChatError, HttpError) as error:
            print(f"fastserve chat: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            loop.run(http.close())


def _parser() -> Parser:
    parser = Parser(prog="fastserve chat", description=f"Talk to the served model. {HELP}")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the server's HTTP API (default: {DEFAULT_URL})")
    parser.add_argument("--model", help="(default: the first that the server lists)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_api_key(parser)
    add_sampling(parser)
    return parser


class Conversation:
    """The messages so far. An answer that was cut short or failed leaves no trace in them."""

    def __init__(self, http: HttpClient, fields: dict[str, object], system: str | None) -> None:
        self._http = http
        self._fields = fields
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def reset(self) -> None:
        self.messages = list(self._start)

    async def ask(self, text: str) -> None:
        """Write the answer as it comes. Raises ChatError or HttpError; cancelling aborts it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = json.dumps({**self._fields, "messages": messages}).encode()
        answer = _Answer()
        payload = self._http.payload("POST", "/v1/chat/completions", body)
        response = await self._http.send(payload, SseLines(answer.on_data).feed)
        if not response.ok:
            raise ChatError(_refusal(response.status, bytes(response.body)))
        if answer.error:
            raise ChatError(answer.error)
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer.texts)}]


class _Answer:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.error = ""

    def on_data(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            self.error = _error_text(event)
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or ""
            self.texts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()


async def _first_model(http: HttpClient) -> str:
    response = await http.send(http.payload("GET", "/v1/models"))
    if not response.ok:
        raise ChatError(_refusal(response.status, bytes(response.body)))
    models = json.loads(bytes(response.body)).get("data")
    if not models:
        raise ChatError("the server lists no model; name it with --model")
    return str(models[0]["id"])


def _converse(loop: asyncio.Runner, conversation: Conversation) -> int:
    """Returns 1 when input came from a pipe and a turn failed; a person sees the error and goes on."""
    interactive = sys.stdin.isatty()
    for line in _lines(interactive):
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            conversation.reset()
            continue
        try:
            loop.run(conversation.ask(line))
        except KeyboardInterrupt:
            if not interactive:
                raise
        except (ChatError, HttpError) as error:
            print(f"fastserve chat: {error}", file=sys.stderr)
            if not interactive:
                return 1
        print()
    return 0


def _lines(interactive: bool) -> Iterator[str]:
    if interactive:
        print(HELP)
        import readline  # noqa: F401 - gives `input` its history and editing
    while True:
        try:
            line = input("> ") if interactive else next(sys.stdin)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        except (EOFError, StopIteration):
            return
        if line.strip():
            yield line.strip()


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {_error_text(json.loads(body))}"
    except ValueError:
        return f"HTTP {status}"


def _error_text(answer: object) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
