"""The real stage: an engine model, its KV pool, and the sampler behind the last layer."""

import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fastserve_worker.backend import Turn
from fastserve_worker.engine import BatchRow, KvPool, ModelShape, PagedBatch, StageModel
from fastserve_worker.errors import PlanError
from fastserve_worker.messages import Activations, Plan, ProfilePoint, RawBytes, StageInfo, StageOutput
from fastserve_worker.ranks.group import RankGroup
from fastserve_worker.sampling.params import DrawParams
from fastserve_worker.sampling.sampler import draw_tokens
from fastserve_worker.settings import DType, WorkerSettings
from fastserve_worker.sizing import count_blocks
from fastserve_worker.swap.torch_blocks import blocks_of

log = logging.getLogger(__name__)

#: Timed runs of a profile point, after one that is not timed; the median counts.
PROFILE_RUNS = 3

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TorchStage:
    """A StageBackend. One thread loads it and runs it."""

    def __init__(self, model: StageModel, pool: KvPool, info: StageInfo, group: RankGroup | None = None) -> None:
        """`group`: this rank among those that share the stage; None: it is alone."""
        self.info = info
        self._model = model
        self._pool = pool
        self._group = group
        self.memory = blocks_of(pool, info.num_ranks * whole_block_bytes(model.config, info.block_size))

    @classmethod
    def load(cls, settings: WorkerSettings, meet: Callable[[torch.device], RankGroup] | None = None) -> "TorchStage":
        """`meet`: joins the other ranks of the stage, where there are some; it waits for them.

        Raises ValueError, with a sentence for the operator, for what cannot be served."""
        begin_s = time.monotonic()
        torch.set_num_threads(settings.num_threads)
        model_dir = settings.model_dir
        if model_dir is None or not model_dir.is_dir():
            raise ValueError(f"--model-dir: {model_dir} is not a folder")
        device = _device(settings)
        group = None if meet is None else meet(device)
        log.info("loading", extra={"model_dir": str(model_dir), "of_stages": settings.num_stages})
        model = StageModel.load(
            model_dir,
            stage=settings.stage,
            num_stages=settings.num_stages,
            dtype=_dtype(settings.dtype, device, model_dir),
            device=device,
            linear=settings.linear,
            ranks=group,
        )
        max_model_len = _max_model_len(settings.max_model_len, model.config)
        num_blocks = count_blocks(
            kv_memory=settings.kv_memory,
            block_bytes=settings.tensor_parallel_size * whole_block_bytes(model.config, settings.block_size),
            block_size=settings.block_size,
            max_model_len=max_model_len,
        )
        stage = cls.of_model(
            model,
            stage=settings.stage,
            num_stages=settings.num_stages,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            max_model_len=max_model_len,
            device=device,
            group=group,
        )
        token_ns = stage.profile(
            ProfilePoint(1, 1, 0), (0, 0, 1)
        )  # also makes every lazy part ready before the first request
        log.info(
            "loaded layers %d to %d of %d in %.1f s",
            model.config.first_layer,
            model.config.last_layer,
            model.config.num_layers,
            time.monotonic() - begin_s,
            extra={"num_blocks": num_blocks, "threads": settings.num_threads, "token_ms": round(token_ns / 1e6, 2)},
        )
        return stage

    @classmethod
    def of_model(
        cls,
        model: StageModel,
        *,
        stage: int,
        num_stages: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        group: RankGroup | None = None,
    ) -> "TorchStage":
        """Around a loaded model, with a pool of its own."""
        shape = model.config
        dtype = _DTYPE_NAMES[shape.dtype]
        info = StageInfo(
            stage=stage,
            num_stages=num_stages,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=shape.vocab_size,
            fingerprint=f"{shape.fingerprint}-{dtype}",
            kv_block_bytes=shape.kv_block_bytes(block_size),
            device=device.type if group is None else f"{device.type}x{group.size}",
            dtype=dtype,
            hidden_size=shape.hidden_size,
            hidden_dtype=dtype,
            rank=group.rank if group else 0,
            num_ranks=group.size if group else 1,
        )
        pool = KvPool.for_model(shape, num_blocks=num_blocks, device=device, block_size=block_size)
        return cls(model, pool, info, group)

    def start_epoch(self, epoch: int) -> None:
        """Ranks meet, so that none is left waiting for an iteration of an epoch that is over. What is in the pool is
        overwritten before it is read, because every job starts anew."""
        if self._group:
            self._group.begin((epoch, -1, 0))

    def run(self, plan: Plan, activations: Activations | None) -> StageOutput:
        begin_ns = time.perf_counter_ns()
        if not plan.rows:
            return StageOutput(time.perf_counter_ns() - begin_ns)
        if self._group:
            self._group.begin((plan.epoch, plan.seq, 0))
        rows = [
            BatchRow(row.start, row.num_tokens, memoryview(row.block_table), row.draw is not None) for row in plan.rows
        ]
        batch = PagedBatch(rows, self._pool)
        output = self._model.forward(self._inputs(plan, activations), batch)
        if self.info.is_last:
            draws = draw_tokens(output, [row.draw for row in plan.rows if row.draw is not None])
            self._synchronize()
            return StageOutput(time.perf_counter_ns() - begin_ns, draws=draws)
        hidden = _raw_bytes(output) if self.info.sends_on else b""
        self._synchronize()
        return StageOutput(time.perf_counter_ns() - begin_ns, hidden)

    def _inputs(self, plan: Plan, activations: Activations | None) -> torch.Tensor:
        """Hidden states come to rank 0 alone, which shares them."""
        if self.info.is_first:
            return self._token_ids(plan)
        if activations is not None:
            hidden = self._hidden_states(activations)
        else:
            shape = (plan.num_tokens, self.info.hidden_size)
            hidden = torch.empty(shape, dtype=_DTYPES[self.info.hidden_dtype], device=self._pool.device)
        if self._group:
            self._group.share(hidden)
        return hidden

    def profile(self, point: ProfilePoint, turn: Turn) -> int:
        """Runs on a pool made for it, as large as the point needs: KV of live jobs is not touched."""
        batch = PagedBatch(*self._scratch(point))
        generator = torch.Generator(self._pool.device).manual_seed(0)
        batch.pool.data.normal_(generator=generator)  # untouched zero pages would all be the same, cached one
        if self.info.is_first:
            shape, kind = (batch.num_tokens,), torch.int64
            inputs = torch.randint(self.info.vocab_size, shape, generator=generator, device=self._pool.device)
        else:
            kind = _DTYPES[self.info.hidden_dtype]
            inputs = torch.randn(
                (batch.num_tokens, self.info.hidden_size), generator=generator, device=self._pool.device
            ).to(kind)
        if self._group:
            self._group.begin(turn)
        times_ns = [self._time(inputs, batch) for _ in range(1 + PROFILE_RUNS)]
        return round(statistics.median(times_ns[1:]))

    def _time(self, inputs: torch.Tensor, batch: PagedBatch) -> int:
        begin_ns = time.perf_counter_ns()
        output = self._model.forward(inputs, batch)
        if self.info.is_last:
            draw_tokens(output, [DrawParams(output_position=0)] * batch.num_sampled)
        self._synchronize()
        return time.perf_counter_ns() - begin_ns

    def _scratch(self, point: ProfilePoint) -> tuple[list[BatchRow], KvPool]:
        """Rows of the point, each with blocks of its own, in a pool of just that size."""
        length = point.context_tokens + point.new_tokens
        blocks_each = -(-length // self.info.block_size)
        num_blocks = point.num_sequences * blocks_each
        if min(point.num_sequences, point.new_tokens) < 1 or length > self.info.max_model_len:
            raise ValueError(f"{point} is not a batch of sequences of 1 to {self.info.max_model_len} tokens")
        if num_blocks > self.info.num_blocks:
            raise ValueError(f"{point} needs {num_blocks} blocks, the pool has {self.info.num_blocks}")
        rows = [
            BatchRow(point.context_tokens, point.new_tokens, range(i * blocks_each, (i + 1) * blocks_each), sample=True)
            for i in range(point.num_sequences)
        ]
        pool = KvPool.for_model(
            self._model.config, num_blocks=num_blocks, device=self._pool.device, block_size=self.info.block_size
        )
        return rows, pool

    def _token_ids(self, plan: Plan) -> torch.Tensor:
        """int64 [tokens]. An id outside the vocabulary would end the whole process on an accelerator."""
        ids = np.frombuffer(b"".join(row.token_ids for row in plan.rows), dtype="<u4").astype(np.int64)
        if ids.max() >= self.info.vocab_size:
            raise PlanError(f"token id {ids.max()} is outside the vocabulary of {self.info.vocab_size}")
        return torch.from_numpy(ids).to(self._pool.device)

    def _hidden_states(self, activations: Activations) -> torch.Tensor:
        flat = torch.frombuffer(activations.data, dtype=_DTYPES[activations.dtype])
        return flat.view(activations.shape).to(self._pool.device)

    def _synchronize(self) -> None:
        """Kernels run behind the program on an accelerator: a time is one only when they are done."""
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)


def whole_block_bytes(shape: ModelShape, block_size: int) -> int:
    """Bytes of a block over all layers of the model: what --kv-memory is divided by on every stage alike."""
    return shape.kv_block_bytes(block_size) // shape.num_stage_layers * shape.num_layers


def _raw_bytes(hidden: torch.Tensor) -> RawBytes:
    """The tensor's own memory where it is on the host already."""
    return hidden.contiguous().view(torch.uint8).flatten().cpu().numpy().data


def _device(settings: WorkerSettings) -> torch.device:
    """Of several accelerators that this process sees, each worker of the node takes the next one."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device: cuda is not available on this machine")
    stage = settings.replica * settings.num_stages + settings.stage
    index = stage * settings.tensor_parallel_size + settings.tensor_parallel_rank
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _dtype(name: DType, device: torch.device, model_dir: Path) -> torch.dtype:
    """`auto`: 32 bits on a CPU, where the short types are emulated; else what the checkpoint is stored in."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    config = json.loads((model_dir / "config.json").read_text())
    return _DTYPES.get(config.get("dtype") or config.get("torch_dtype") or "", torch.bfloat16)


def _max_model_len(wanted: int | None, shape: ModelShape) -> int:
    limit = shape.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ValueError(f"--max-model-len: the model has positions for {limit} tokens only (got {wanted})")
    return wanted or limit
