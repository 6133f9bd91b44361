"""`fastserve top`: what is queued, running and resident now, once or live."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from rich.console import Console
from rich.live import Live

from fastserve.cli.arguments import Parser
from fastserve.cli.find import find_state, scheduler_addresses
from fastserve.cli.top_view import Sample, Samples, frames, unreachable
from fastserve.v1 import scheduler_pb2 as pb
from fastserve.v1 import scheduler_pb2_grpc as rpc
from fastserve_common.channels import open_channel
from fastserve_common.settings import SettingsError
from fastserve_common.state import StateError, without_password
from fastserve_common.tls import add_tls_arguments, adopt, given_identity

CALL_TIMEOUT_S = 2.0


class TopError(Exception):
    """There is nothing to show; a sentence."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where schedulers are: a fixed address, or whoever the state store names now (it changes on takeover)."""

    address: str | None
    state_url: str | None
    #: Only of this group; None: of all there are.
    group: str | None = None

    async def resolve(self) -> str:
        """The one there is. Raises TopError, also when there are several."""
        found = await self.resolve_all()
        if len(found) > 1:
            raise TopError(f"there are several groups; choose one with --group: {', '.join(found)}")
        return next(iter(found.values()))

    async def resolve_all(self) -> dict[str, str]:
        """At least one, by group. Raises TopError."""
        if self.address is not None:
            return {"": self.address}
        assert self.state_url is not None
        try:
            found = await scheduler_addresses(self.state_url)
        except StateError as error:
            raise TopError(f"the state store does not answer: {error}") from error
        if self.group is not None:
            found = {group: address for group, address in found.items() if group == self.group}
        if not found:
            of_group = "" if self.group is None else f" of the group {self.group}"
            raise TopError(f"no scheduler{of_group} is registered in {without_password(self.state_url)}")
        return found


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if not args.interval > 0:
        raise SettingsError(f"--interval must be above 0 (got {args.interval:g})")
    adopt(given_identity(args))
    source = Source(args.scheduler, None if args.scheduler else find_state(args.state, args.run_dir), args.group)
    console = Console()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_once(source, console) if args.once else _live(source, console, args.interval))
    except TopError as error:
        print(f"fastserve top: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="fastserve top", description="Show the scheduler's queues, batches and memory. Ctrl-C ends it."
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--scheduler", metavar="HOST:PORT", help="ask this scheduler")
    where.add_argument(
        "--state", metavar="URL", help="ask the scheduler registered here: sqlite:///path or redis://..."
    )
    where.add_argument(
        "--run-dir", metavar="DIR", help="of `fastserve serve` (default: of the one running on this machine)"
    )
    parser.add_argument("--group", metavar="NAME", help="of this group of schedulers (default: of all)")
    add_tls_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one frame and end, for scripts")
    return parser


async def sample(address: str) -> Sample:
    """One look. Raises TopError."""
    async with open_channel(address) as channel:
        try:
            state = await rpc.SchedulerStub(channel).GetState(pb.GetStateRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise TopError(f"the scheduler at {address} does not answer: {error.details()}") from error
    return Sample(address, time.monotonic(), state)


async def samples(source: Source) -> Samples:
    """One look at every group, in the order of their names. Raises TopError when one does not answer."""
    found = await source.resolve_all()
    looks = await asyncio.gather(*(sample(address) for address in found.values()))
    return dict(zip(found, looks, strict=True))


async def _once(source: Source, console: Console) -> None:
    console.print(frames(await samples(source), {}))


async def _live(source: Source, console: Console, interval_s: float) -> None:
    """Until interrupted. A scheduler that goes away is waited for; one that was never there is an error."""
    before = await samples(source)
    with Live(frames(before, {}), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            await asyncio.sleep(interval_s)
            try:
                now = await samples(source)
            except TopError as error:
                live.update(unreachable(str(error), before), refresh=True)
                continue
            live.update(frames(now, before), refresh=True)
            before = now
