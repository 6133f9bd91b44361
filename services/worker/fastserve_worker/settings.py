"""What an operator can set."""

import os
import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from fastserve_common.state import DEFAULT_GROUP, GROUP_PATTERN
from fastserve_common.tls import ClusterSettings
from fastserve_common.units import GIB, SizeBytes

Device = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Linear = Literal["auto", "torch", "packed", "fp16"]

#: Of the CPU kernels; the engine's constant, which cannot be imported without torch.
NATIVE_BLOCK_SIZE = 16


class WorkerSettings(ClusterSettings):
    """One stage of a FastServe pipeline: some layers of the model, and the KV of those layers."""

    state: str = Field(description="where the cluster meets: sqlite:///path or redis://host:port")
    listen: str = Field("127.0.0.1:0", description="HOST:PORT to listen on; port 0 picks one")
    advertise: str = Field(
        "", description="HOST or HOST:PORT that others reach this stage at (default: where it listens)"
    )
    model_dir: Path | None = Field(None, description="folder with config.json and safetensors weights")
    group: str = Field(
        DEFAULT_GROUP, pattern=GROUP_PATTERN, description="group of schedulers and stages that this stage belongs to"
    )
    replica: int = Field(0, ge=0, description="which pipeline of the model this stage is part of, from 0")
    stage: int = Field(0, ge=0, description="which stage of the pipeline this is, from 0")
    num_stages: int = Field(1, ge=1, description="stages of the pipeline")
    tensor_parallel_size: int = Field(1, ge=1, description="ranks that share each layer of the stage")
    tensor_parallel_rank: int = Field(0, ge=0, description="which of them this is, from 0")
    device: Device = Field("cpu", description="cpu or cuda")
    dtype: DType = Field("auto", description="auto, float32, bfloat16 or float16; auto: float32 on a CPU")
    linear: Linear = Field("auto", description="kind of linear layers: auto, torch, packed or fp16")
    threads: int = Field(0, ge=0, description="threads that compute (default: the cores divided among the stages)")
    kv_memory: SizeBytes = Field(
        GIB, ge=1, description="memory for KV of all layers of the model; each stage takes its layers' share"
    )
    block_size: int = Field(16, ge=1, description="tokens in a block of KV")
    node: str = Field(default_factory=socket.gethostname, description="node whose kvstore this stage swaps KV with")
    kv_checksums: bool = Field(
        False, description="store a checksum with every block on the host and compare it; on all stages or none"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="longest sequence, prompt and answer (default: the model's own limit)"
    )
    stall_timeout: float = Field(
        600.0, gt=0, description="seconds after which an iteration that does not end makes this process unhealthy"
    )
    metrics_listen: str = Field("", description="HOST:PORT of the Prometheus endpoint; empty: none")
    fake: bool = Field(False, description="serve known tokens without a model, to try the system out")
    fake_iteration_ms: float = Field(0.0, ge=0, description="with --fake: time of an iteration")
    fake_token_us: float = Field(0.0, ge=0, description="with --fake: additional time per token of an iteration")
    fake_swap_ms: float = Field(0.0, ge=0, description="with --fake: time of a swap")
    fake_vocab_size: int = Field(1024, ge=64, description="with --fake: token ids are below this")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stage >= self.num_stages:
            raise ValueError(f"--stage: {self.stage} is not one of {self.num_stages} stages, counted from 0")
        if self.tensor_parallel_rank >= self.tensor_parallel_size:
            raise ValueError(
                f"--tensor-parallel-rank: {self.tensor_parallel_rank} is not one of {self.tensor_parallel_size} ranks, "
                "counted from 0"
            )
        if self.fake and self.tensor_parallel_size > 1:
            raise ValueError("--tensor-parallel-size: a fake stage has no layers to share")
        if self.model_dir is None and not self.fake:
            raise ValueError("--model-dir: needed, unless --fake")
        if not (self.block_size == NATIVE_BLOCK_SIZE or self.fake or self.device != "cpu" or self.linear == "torch"):
            raise ValueError(
                f"--block-size: the CPU kernels work on blocks of {NATIVE_BLOCK_SIZE} tokens; leave it at that, or set "
                f"--linear torch, which does without them and is slower (got {self.block_size})"
            )
        if not self.listen.rpartition(":")[2].isdecimal():
            raise ValueError(f"--listen: expected HOST:PORT (got {self.listen!r})")
        return self

    @property
    def num_threads(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // (self.num_stages * self.tensor_parallel_size))

    def address(self, port: int) -> str:
        """What to tell others, once it is known which port is listened on."""
        if ":" in self.advertise:
            return self.advertise
        host = self.advertise or self.listen.rpartition(":")[0]
        if host in ("", "0.0.0.0", "[::]"):  # every interface: others need a name
            host = socket.gethostname()
        return f"{host}:{port}"
