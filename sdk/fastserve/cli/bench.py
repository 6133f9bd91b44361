"""`fastserve bench`: measure a server under load. The benchmark itself is `fastserve.bench`."""

from collections.abc import Sequence

from rich.console import Console

from fastserve.bench import command, options
from fastserve.cli.arguments import EXIT_INTERRUPTED, Parser
from fastserve_common.settings import SettingsError


def run(argv: Sequence[str]) -> int:
    parser = Parser(prog="fastserve bench", description="Send requests to a server and measure its answers.")
    options.add_arguments(parser)
    try:
        chosen = options.from_args(parser.parse_args(argv))
    except options.OptionError as error:
        raise SettingsError(str(error)) from error
    try:
        return command.run(chosen, Console())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
