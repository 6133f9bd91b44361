"""`fastserve generate PROMPT`: one answer, written as it is generated."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastserve.cli.arguments import EXIT_INTERRUPTED, Parser, add_address, add_api_key, add_sampling, sampling, tls
from fastserve.client import Client
from fastserve.errors import FastServeError
from fastserve.types import GenerateOptions, Usage
from fastserve_common.settings import SettingsError


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    prompt = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    if not prompt:
        raise SettingsError("the prompt is empty")
    options = sampling(args)
    if args.stop:
        options["stop"] = args.stop
    options["ignore_eos"] = args.ignore_eos
    options["priority"] = args.priority
    try:
        with Client(args.address, api_key=args.api_key, tls=tls(args), tls_name=args.tls_name) as client:
            timing = _write(client, prompt, options, args.timeout)
    except FastServeError as error:
        print(f"fastserve generate: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    if args.stats:
        print(timing.sentence(), file=sys.stderr)
    return 0


def _parser() -> Parser:
    parser = Parser(prog="fastserve generate", description="Generate text, written as it comes.")
    parser.add_argument("prompt", nargs="?", help="the text to continue; left out or -: read from standard input")
    add_address(parser)
    add_api_key(parser)
    add_sampling(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer here; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="lower runs earlier (default: 0)")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so many seconds")
    parser.add_argument("--stats", action="store_true", help="tell counts and speed on standard error")
    return parser


@dataclass(slots=True)
class _Timing:
    began_s: float
    first_s: float | None = None
    ended_s: float = 0.0
    usage: Usage | None = None

    def sentence(self) -> str:
        first_s = self.ended_s if self.first_s is None else self.first_s
        prompt, answer = (self.usage.prompt_tokens, self.usage.completion_tokens) if self.usage else (0, 0)
        took_s = self.ended_s - self.began_s
        return (
            f"{prompt} prompt tokens, {answer} generated in {took_s:.2f} s "
            f"(first after {first_s - self.began_s:.2f} s, {answer / max(took_s, 1e-9):.1f} tokens/s)"
        )


def _write(client: Client, prompt: str, options: GenerateOptions, timeout_s: float | None) -> _Timing:
    timing = _Timing(began_s=time.monotonic())
    with client.stream(prompt, timeout=timeout_s, **options) as stream:
        for chunk in stream:
            if chunk.token_ids and timing.first_s is None:
                timing.first_s = time.monotonic()
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            timing.usage = chunk.usage or timing.usage
    sys.stdout.write("\n")
    timing.ended_s = time.monotonic()
    return timing
