"""`fastserve ctl`: what an operator sees and changes of a running scheduler."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.field_mask_pb2 import FieldMask

from fastserve.cli.arguments import Parser
from fastserve.cli.find import find_state
from fastserve.cli.top import Source, TopError
from fastserve.v1 import admin_pb2 as pb
from fastserve.v1 import admin_pb2_grpc as rpc
from fastserve_common.channels import open_channel
from fastserve_common.settings import SettingsError
from fastserve_common.tls import add_tls_arguments, adopt, given_identity

CALL_TIMEOUT_S = 5.0

_FIELDS = {field.name: field for field in pb.SchedulingConfig.DESCRIPTOR.fields}
_NS_PER_MS = 1_000_000


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    adopt(given_identity(args))
    source = Source(args.scheduler, None if args.scheduler else find_state(args.state, args.run_dir), args.group)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for line in asyncio.run(_call(source, args.command(args))):
                print(line)
    except TopError as error:
        print(f"fastserve ctl: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        said = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        print(f"fastserve ctl: {said}", file=sys.stderr)
        return 1
    return 0


Lines = list[str]
Order: TypeAlias = "Callable[[rpc.AdminAsyncStub], Awaitable[Lines]]"


async def _call(source: Source, order: Order) -> Lines:
    async with open_channel(await source.resolve()) as channel:
        return await order(rpc.AdminStub(channel))


def _parser() -> Parser:
    parser = Parser(
        prog="fastserve ctl",
        description="See and change a running scheduler. Changes count over its flags of the same names, also when "
        "another scheduler leads, until they are reset.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--scheduler", metavar="HOST:PORT", help="of this scheduler")
    where.add_argument("--state", metavar="URL", help="of the scheduler registered here: sqlite:///path or redis://...")
    where.add_argument(
        "--run-dir", metavar="DIR", help="of `fastserve serve` (default: of the one running on this machine)"
    )
    parser.add_argument("--group", metavar="NAME", help="of this group of schedulers, where there are several")
    add_tls_arguments(parser)
    parser.add_argument("--reason", default="", help="for the audit log")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str, order: Callable[[Any], Order]) -> Any:  # noqa: ANN401 - argparse's own
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=order)
        return added

    command("get", "show the settings that can be changed", lambda args: _get)
    setting = command("set", "change settings, all or none", lambda args: _set(args.settings, args.reason))
    setting.add_argument("settings", nargs="+", metavar="NAME=VALUE", help="such as alpha_ms=5000 policy=fcfs")
    reset = command("reset", "take changes back", lambda args: _reset(args.names, args.reason))
    reset.add_argument("names", nargs="*", metavar="NAME", help="such as alpha_ms (default: all that was changed)")
    command("drain", "refuse new requests, let the others finish", lambda args: _drain(args.reason))
    command("resume", "accept requests again", lambda args: _resume(args.reason))
    jobs = command("jobs", "list the requests in progress, the oldest first", lambda args: _jobs(args.limit))
    jobs.add_argument("--limit", type=int, default=100, metavar="N", help="at most so many (default: 100)")
    story = command("story", "what happened to a request", lambda args: _story(args.id))
    story.add_argument("id", help="request id; job number for one that has ended")
    abort = command("abort", "end a request", lambda args: _abort(args.id, args.reason))
    abort.add_argument("id", help="request id")
    return parser


async def _get(stub: "rpc.AdminAsyncStub") -> Lines:
    answer = await stub.GetConfig(pb.GetConfigRequest(), timeout=CALL_TIMEOUT_S)
    state = "draining" if answer.draining else "accepting requests"
    if answer.revision:
        changed = f"changed {answer.revision} times since this scheduler leads"
    else:
        changed = "as another scheduler was told" if answer.overrides else "as started"
    overrides = [_told(entry, answer.configured) for entry in answer.overrides]
    return [*_listed(answer.config), *overrides, *_unsaved(answer.not_saved), f"# {state}, {changed}"]


def _told(entry: pb.ConfigOverride, configured: pb.SchedulingConfig) -> str:
    """By whom a setting was changed, and what it would be without."""
    when = datetime.fromtimestamp(entry.changed_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    before = _shown(getattr(configured, entry.name)) if entry.name in _FIELDS else "?"
    why = f": {entry.reason}" if entry.reason else ""
    return f"# {entry.name} was changed {when} by {entry.peer}{why} (started with {before})"


def _unsaved(why: str) -> Lines:
    return [f"# applied, not saved: another scheduler would not know of it as yet ({why})"] if why else []


def _listed(config: pb.SchedulingConfig) -> Lines:
    return [f"{name}={_shown(getattr(config, name))}" for name in _FIELDS]


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _set(settings: Sequence[str], reason: str) -> Order:
    """Raises SettingsError for what no scheduler could be told."""
    config = pb.SchedulingConfig()
    names = [_put(config, setting) for setting in settings]

    async def order(stub: "rpc.AdminAsyncStub") -> Lines:
        request = pb.UpdateConfigRequest(config=config, update_mask=FieldMask(paths=names), reason=reason)
        answer = await stub.UpdateConfig(request, timeout=CALL_TIMEOUT_S)
        return [*_listed(answer.config), *_unsaved(answer.not_saved)]

    return order


def _reset(names: Sequence[str], reason: str) -> Order:
    """Raises SettingsError for what no scheduler could be told."""
    known = [_name(name) for name in names]
    for name, given in zip(known, names, strict=True):
        if name not in _FIELDS:
            raise SettingsError(f"reset: expected some of {', '.join(_FIELDS)} (got {given!r})")

    async def order(stub: "rpc.AdminAsyncStub") -> Lines:
        request = pb.ResetConfigRequest(reset_mask=FieldMask(paths=known), reason=reason)
        answer = await stub.ResetConfig(request, timeout=CALL_TIMEOUT_S)
        return [*_listed(answer.config), *_unsaved(answer.not_saved)]

    return order


def _name(given: str) -> str:
    """Of a setting, also when it is written like its flag."""
    return given.strip().removeprefix("--").replace("-", "_")


def _put(config: pb.SchedulingConfig, setting: str) -> str:
    name, equals, value = setting.partition("=")
    name = _name(name)
    field = _FIELDS.get(name)
    if field is None or not equals:
        raise SettingsError(f"set: expected NAME=VALUE with one of {', '.join(_FIELDS)} (got {setting!r})")
    kinds: dict[int, Callable[[str], object]] = {field.TYPE_DOUBLE: float, field.TYPE_UINT32: int}
    try:
        setattr(config, name, kinds.get(field.type, str)(value))
    except ValueError as error:
        raise SettingsError(f"set: {name} must be a number that is not negative (got {value!r})") from error
    return name


def _drain(reason: str) -> Order:
    async def order(stub: "rpc.AdminAsyncStub") -> Lines:
        answer = await stub.Drain(pb.DrainRequest(reason=reason), timeout=CALL_TIMEOUT_S)
        return [f"draining, {answer.live} requests in progress"]

    return order


def _resume(reason: str) -> Order:
    async def order(stub: "rpc.AdminAsyncStub") -> Lines:
        await stub.Resume(pb.ResumeRequest(reason=reason), timeout=CALL_TIMEOUT_S)
        return ["accepting requests"]

    return order


def _jobs(limit: int) -> Order:
    async def order(stub: "rpc.AdminAsyncStub") -> Lines:
        answer = await stub.ListJobs(pb.ListJobsRequest(limit=limit), timeout=CALL_TIMEOUT_S)
        head = f"{'job':>8} {'state':<9} {'level':>5} {'prompt':>7} {'output':>13} {'age':>9} {'waits':>9}  request"
        return [head, *map(_row, answer.jobs), f"# {len(answer.jobs)} of {answer.total}"]

    return order


def _row(job: pb.JobState) -> str:
    output = f"{job.output_tokens}/{job.max_tokens}"
    return (
        f"{job.job_id:>8} {job.state:<9} {job.level:>5} {job.prompt_tokens:>7} {output:>13}"
        f" {job.age_ms / 1000:>7.1f} s {job.waiting_ms / 1000:>7.1f} s  {job.request_id}"
    )


def _story(name: str) -> Order:
    async def order(stub: "rpc.AdminAsyncStub") -> Lines:
        by_number = pb.GetJobStoryRequest(job_id=int(name)) if name.isdecimal() else None
        try:
            request = pb.GetJobStoryRequest(request_id=name)
            answer = await stub.GetJobStory(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if by_number is None or error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            answer = await stub.GetJobStory(by_number, timeout=CALL_TIMEOUT_S)
        first_ns = answer.moments[0].now_ns
        moments = [
            f"{(moment.now_ns - first_ns) / _NS_PER_MS:>12.3f} ms  {moment.happening} {moment.detail}"
            for moment in answer.moments
        ]
        return [f"job {answer.job_id}", *moments]

    return order


def _abort(name: str, reason: str) -> Order:
    async def order(stub: "rpc.AdminAsyncStub") -> Lines:
        await stub.AbortJob(pb.AbortJobRequest(request_id=name, reason=reason), timeout=CALL_TIMEOUT_S)
        return [f"{name} is aborted"]

    return order
