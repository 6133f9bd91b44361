"""Every state that a request can be in when something happens to it, and how it gets there."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastserve_worker.fake_stage import FakeOptions
from fastserve_worker.messages import SwapDirection

from .rig import Answer, TestGateway, until, until_async
from .swap_rig import SwapCluster, ask

OUT, IN = SwapDirection.OUT, SwapDirection.IN

#: It runs for a third of a second, so that it is still there when the others come.
ITERATION_NS = 3_000_000
FLAGS = ("--policy", "srpt", "--max-num-seqs", "2", "--reattach-grace", "0", "--swap-timeout", "0.5")
#: Prompts of sixty tokens are computed in two parts.
CHUNK_TOKENS = 32

Asked = list[tuple[Answer, list[int]]]
#: Brings the request, which is the first of those asked for, into a state, and says what must become of all of them.
Enter = Callable[[SwapCluster, TestGateway], Awaitable[Asked]]


def swap_cluster(folder: Path, *flags: str, options: FakeOptions | None = None, checksums: bool = False) -> SwapCluster:
    """Forty blocks; two of the others fill them."""
    options = options or FakeOptions(iteration_ns=ITERATION_NS, token_ns=1_000)
    every = [*FLAGS, "--kv-policy", "reactive", *flags]
    return SwapCluster(folder, 2, num_blocks=40, num_slots=256, options=options, flags=every, checksums=checksums)


async def ask_for_it(gateway: TestGateway) -> tuple[Answer, list[int]]:
    return await ask(gateway, 0, 8, 100)


async def ask_others(gateway: TestGateway) -> Asked:
    """They are shorter, so they come first."""
    return [await ask(gateway, n, 60, 16) for n in range(1, 4)]


def begun_everywhere(cluster: SwapCluster, direction: SwapDirection) -> bool:
    """Its copies; those out begin at each stage when the plans before them have been computed there."""
    orders = [order for order in tuple(cluster.script.begun) if order.job_id == cluster.script.it]
    return sum(order.direction is direction for order in orders) >= len(cluster.stages)


async def _queued(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    cluster.compute(False)
    it, others = await ask_for_it(gateway), await ask_others(gateway)

    async def waits() -> bool:
        return (await cluster.state()).waiting >= 1

    await until_async(waits)
    return [it, *others]


async def _in_a_chunk(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    """The first part of its prompt is at a stage."""
    cluster.compute(False)
    it = await ask(gateway, 0, 60, 16)

    async def computes() -> bool:
        return (await cluster.state()).running >= 1

    await until_async(computes)
    return [it]


async def _running(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    it = await ask_for_it(gateway)
    await until(lambda: len(it[0].ids) > 5)
    cluster.compute(False)
    return [it]


async def begin_out(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    it = await ask_for_it(gateway)
    await until(lambda: len(it[0].ids) > 5)
    others = await ask_others(gateway)
    await until(lambda: begun_everywhere(cluster, OUT))
    return [it, *others]


async def _swapping_out(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    cluster.script.hold(cluster.script.it, OUT)
    return await begin_out(cluster, gateway)


async def _on_host(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    asked = await _swapping_out(cluster, gateway)
    cluster.compute(False)
    cluster.script.release()

    async def swapped() -> bool:
        return (await cluster.state()).swapped >= 1

    await until_async(swapped)
    return asked


async def _swapping_in(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    asked = await _on_host(cluster, gateway)
    cluster.script.hold(cluster.script.it, IN)
    cluster.compute(True)
    await until(lambda: begun_everywhere(cluster, IN))
    return asked


async def _waiting_to_go_on(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    """Its KV is back and no token has been computed with it."""
    asked = await _swapping_in(cluster, gateway)
    cluster.compute(False)
    before = (await cluster.state()).swaps_in
    cluster.script.release()

    async def back() -> bool:
        return (await cluster.state()).swaps_in > before

    await until_async(back)
    return asked


STATES: dict[str, Enter] = {
    "queued": _queued,
    "prefill chunk": _in_a_chunk,
    "running": _running,
    "swapping out": _swapping_out,
    "on host": _on_host,
    "swapping in": _swapping_in,
    "waiting to go on": _waiting_to_go_on,
}
