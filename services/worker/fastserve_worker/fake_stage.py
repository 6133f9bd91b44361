"""A stage without torch whose tokens are known beforehand, for tests, for demonstrations and for newcomers.

Its KV pool keeps token ids by (block, offset). A drawn token is a hash of the ids that the stage *reads back through
the block table*, so a wrong block, a lost or overwritten one, a wrong epoch or a wrong output position shows as a
wrong token. Every stage keeps its own pool; the digest of what the stage before read travels with the activations,
and a stage that read something else spoils it. `fake_answer` is the oracle.

It swaps for real, on the worker's own copy threads, so that a swap that is late, lost or wrong shows in the tokens too.
"""

import contextlib
import threading
import time
import zlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from fastserve.v1 import stage_pb2
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_worker.backend import CopyBlock, Turn
from fastserve_worker.control import ControlSession, Stage
from fastserve_worker.messages import (
    Activations,
    KvShape,
    Plan,
    PlanRow,
    ProfilePoint,
    StageInfo,
    StageOutput,
    SwapDirection,
    SwapOrder,
)
from fastserve_worker.sampling.params import DrawParams, TokenDraw
from fastserve_worker.sampling.uniform import mix64
from fastserve_worker.service import serve_in_process
from fastserve_worker.swap.host_slab import HostSlab

#: Ids below are never drawn: tokenizers keep their special tokens there.
FIRST_DRAWN_ID = 32
FAKE_VOCAB_SIZE = 1024

#: Columns of the fake hidden states: the token id, and at a row's last token the digest of its context.
_HIDDEN_SIZE = 2


class FakeFaultError(Exception):
    """An ordered failure."""


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """How a fake stage behaves. Plans are counted from 1 over the life of the stage."""

    vocab_size: int = FAKE_VOCAB_SIZE
    iteration_ns: int = 0
    token_ns: int = 0
    #: Plans whose computation raises.
    fault_on: frozenset[int] = frozenset()
    #: Extra time of single plans.
    delays_ns: Mapping[int, int] = field(default_factory=dict)
    #: Time of every swap, and of single swaps instead, by swap id. The blocks are copied at its end.
    swap_ns: int = 0
    swap_delays_ns: Mapping[int, int] = field(default_factory=dict)
    #: Swaps that are answered with this error and copy nothing, by swap id.
    failed_swaps: Mapping[int, str] = field(default_factory=dict)
    #: Swaps that are carried out but never reported, by swap id (`FakeStageServer`).
    lost_swaps: frozenset[int] = frozenset()


class FakeStage:
    """A StageBackend. Clear `gate` to hold the stage thread at its next plan, set it to let it go on; `swap_gate`
    does the same for copies."""

    def __init__(
        self,
        *,
        stage: int = 0,
        num_stages: int = 1,
        num_blocks: int = 256,
        block_size: int = 16,
        max_model_len: int = 4096,
        options: FakeOptions | None = None,
    ) -> None:
        self.options = options or FakeOptions()
        self.gate = threading.Event()
        self.gate.set()
        self.swap_gate = threading.Event()
        self.swap_gate.set()
        self.plans_seen = 0
        self.info = StageInfo(
            stage=stage,
            num_stages=num_stages,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=self.options.vocab_size,
            fingerprint=f"fake-{self.options.vocab_size}",
            kv_block_bytes=4 * block_size,
            device="fake",
            dtype="uint32",
            hidden_size=_HIDDEN_SIZE,
            hidden_dtype="uint32",
        )
        self._pool = array("I", bytes(4 * num_blocks * block_size))
        self.memory = FakeBlocks(self)

    def start_epoch(self, epoch: int) -> None:
        """Wipes the pool, so that reading what an earlier epoch wrote gives wrong tokens; in place, so that what an
        earlier epoch writes late is read."""
        self._pool[:] = array("I", bytes(4 * len(self._pool)))

    def run(self, plan: Plan, activations: Activations | None) -> StageOutput:
        begin_ns = time.perf_counter_ns()
        self.plans_seen += 1
        self.gate.wait()
        self._take_time(plan)
        if self.plans_seen in self.options.fault_on:
            raise FakeFaultError(f"ordered to fail on plan number {self.plans_seen}")
        received = unpack_u32(bytes(activations.data)) if activations else None
        hidden = array("I")
        draws: list[TokenDraw] = []
        for row in plan.rows:
            offset = len(hidden) // _HIDDEN_SIZE
            ids, upstream = _inputs(row, received, offset)
            digest = self._digest(row, ids)
            if upstream is not None and upstream != digest:
                digest = mix64(upstream << 32 | digest) & 0xFFFFFFFF
            for token_id in ids:
                hidden.extend((token_id, 0))
            hidden[-1] = digest
            if row.draw and self.info.is_last:
                draws.append(_draw(digest, row.draw, self.options.vocab_size))
        return StageOutput(time.perf_counter_ns() - begin_ns, pack_u32(hidden), tuple(draws))

    def profile(self, point: ProfilePoint, turn: Turn) -> int:
        """The configured times; nothing is run."""
        return max(1, self.options.iteration_ns + point.num_sequences * point.new_tokens * self.options.token_ns)

    def _take_time(self, plan: Plan) -> None:
        latency_ns = self.options.iteration_ns + plan.num_tokens * self.options.token_ns
        latency_ns += self.options.delays_ns.get(self.plans_seen, 0)
        if latency_ns:
            time.sleep(latency_ns / 1e9)

    def _digest(self, row: PlanRow, ids: Sequence[int]) -> int:
        """Write the row's ids through its block table, then digest its whole context as read through it."""
        table, size = unpack_u32(row.block_table), self.info.block_size
        for position, token_id in enumerate(ids, row.start):
            self._pool[self._block(table[position // size]) * size + position % size] = token_id
        digest, left = 0, row.start + row.num_tokens
        for block in table[: -(-left // size)]:
            begin = self._block(block) * size
            digest = zlib.crc32(pack_u32(self._pool[begin : begin + min(size, left)]), digest)
            left -= size
        return digest

    def block_bytes(self, block: int) -> memoryview:
        """A block's ids, as bytes to read and write."""
        size = self.info.kv_block_bytes
        return memoryview(self._pool).cast("B")[block * size : (block + 1) * size]

    def _block(self, block: int) -> int:
        if block >= self.info.num_blocks:
            raise ValueError(f"block {block} is outside the pool of {self.info.num_blocks} blocks")
        return block


class FakeBlocks:
    """The fake pool as a BlockMemory."""

    def __init__(self, stage: FakeStage) -> None:
        block_bytes = stage.info.kv_block_bytes
        self.shape = KvShape(1, 1, 1, block_bytes, block_bytes * stage.info.num_stages)
        self._stage = stage

    def attach(self, slab: HostSlab) -> None:
        """Nothing to do."""

    @contextlib.contextmanager
    def copies(self, order: SwapOrder) -> Iterator[CopyBlock]:
        options = self._stage.options
        delay_ns = options.swap_delays_ns.get(order.swap_id, options.swap_ns)
        if delay_ns:
            time.sleep(delay_ns / 1e9)
        self._stage.swap_gate.wait()
        if order.swap_id in options.failed_swaps:
            raise FakeFaultError(options.failed_swaps[order.swap_id])
        yield self._copy_out if order.direction is SwapDirection.OUT else self._copy_in

    def _copy_out(self, block: int, slot: memoryview) -> None:
        slot[:] = self._stage.block_bytes(block)

    def _copy_in(self, block: int, slot: memoryview) -> None:
        self._stage.block_bytes(block)[:] = slot


def _inputs(row: PlanRow, received: "array[int] | None", offset: int) -> tuple[Sequence[int], int | None]:
    """The row's ids, and the digest that the stage before made of its context."""
    if received is None:
        return unpack_u32(row.token_ids), None
    part = received[offset * _HIDDEN_SIZE : (offset + row.num_tokens) * _HIDDEN_SIZE]
    return part[::_HIDDEN_SIZE], part[-1]


def _draw(digest: int, params: DrawParams, vocab_size: int) -> TokenDraw:
    if params.has_penalty and zlib.crc32(params.penalty_prompt + params.penalty_output) != digest:
        digest = mix64(digest) & 0xFFFFFFFF  # the history is not the context: answer wrongly
    seed = params.seed if params.temperature > 0 else 0
    token_id = _hash_token(digest, seed, params.output_position, unpack_u32(params.suppressed), vocab_size)
    if params.logprobs is None:
        return TokenDraw(token_id)
    top = tuple((_next_id(token_id, i, vocab_size), -0.5 - i) for i in range(params.logprobs))
    return TokenDraw(token_id, -0.5, top)


def _hash_token(digest: int, seed: int, position: int, suppressed: Collection[int], vocab_size: int) -> int:
    value = mix64(mix64(digest << 32 | position) ^ (seed & (1 << 64) - 1))
    for step in range(vocab_size):
        token_id = _next_id(FIRST_DRAWN_ID, value + step, vocab_size)
        if token_id not in suppressed:
            return token_id
    raise ValueError("every token is suppressed")


def _next_id(token_id: int, step: int, vocab_size: int) -> int:
    """`step` ids further, round and round through the ids that may be drawn."""
    return FIRST_DRAWN_ID + (token_id - FIRST_DRAWN_ID + step) % (vocab_size - FIRST_DRAWN_ID)


def fake_answer(
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int = FAKE_VOCAB_SIZE,
    seed: int = 0,
    suppressed: Collection[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """What any number of fake stages answers. `seed` counts for sampled requests only (temperature above 0);
    `suppressed` ids are kept away from the first `min_tokens` positions."""
    context = array("I", prompt_ids)
    for position in range(num_tokens):
        kept_away = suppressed if position < min_tokens else ()
        digest = zlib.crc32(pack_u32(context))
        context.append(_hash_token(digest, seed, position, kept_away, vocab_size))
    return list(context[len(prompt_ids) :])


class _ForgetfulSession(ControlSession):
    """Loses the reports of some swaps."""

    def __init__(self, lost_swaps: frozenset[int]) -> None:
        super().__init__()
        self._lost_swaps = lost_swaps

    def send(self, message: stage_pb2.StageMessage) -> None:
        if not (message.HasField("swap") and message.swap.swap_id in self._lost_swaps):
            super().send(message)


class FakeStageServer:
    """A fake stage served on a loopback port while the block runs.

    `async with FakeStageServer(FakeStage(stage=0, num_stages=2)) as server: connect to server.address`

    With `num_host_slots` it swaps with memory of its own; every stage of a pipeline must have as many.
    """

    def __init__(self, backend: FakeStage, num_host_slots: int = 0) -> None:
        self.backend = backend
        self._num_host_slots = num_host_slots
        self._host_generation = 0
        self.address = ""
        self.stage: Stage | None = None
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        serving = serve_in_process(
            self.backend,
            host=self._new_host(self._num_host_slots) if self._num_host_slots else None,
            make_session=lambda: _ForgetfulSession(self.backend.options.lost_swaps),
        )
        self.stage, self.address = await self._exits.enter_async_context(serving)
        return self

    def replace_host(self, num_host_slots: int) -> None:
        """As when the kvstore has been started again: new memory, nothing in it, a generation higher by one."""
        assert self.stage is not None
        self.stage.use_host(self._new_host(num_host_slots))

    def _new_host(self, num_slots: int) -> HostSlab:
        self._host_generation += 1
        return HostSlab.private(num_slots, self.backend.info.kv_block_bytes, generation=self._host_generation)

    async def __aexit__(self, *exc_info: object) -> None:
        self.backend.gate.set()  # a held thread could not end
        self.backend.swap_gate.set()
        await self._exits.aclose()
