"""Settings of the kvstore."""

import socket

from pydantic import Field, PositiveFloat, field_validator

from fastserve_common.tls import ClusterSettings
from fastserve_common.units import GIB, SizeBytes, format_bytes
from fastserve_kvstore.arena import LockMemory

#: Below it the arena could not hold one block of any model worth serving; a typing mistake most likely.
MIN_ARENA_BYTES = 4096


class KvStoreSettings(ClusterSettings):
    """The node's host memory for swapped KV: a shared memory arena and the ledger of its slots."""

    state: str = Field(description="cluster state: sqlite:///path/to/file or redis://host:port/db")
    listen: str = Field("127.0.0.1:0", description="HOST:PORT of the gRPC server; port 0 picks one")
    advertise: str = Field("", description="HOST that others reach this node by; empty: the host of --listen")
    node: str = Field(default_factory=socket.gethostname, description="name of this node in the cluster state")
    host_kv_memory: SizeBytes = Field(1 * GIB, description="size of the arena")
    lock_memory: LockMemory = Field("off", description="lock the arena's pages: off, prefer or require")
    lease_ttl_s: PositiveFloat = Field(30.0, description="seconds after which reserved slots are taken back")
    metrics_listen: str = Field("", description="HOST:PORT of the Prometheus endpoint; empty: none")

    @field_validator("host_kv_memory")
    @classmethod
    def _holds_something(cls, value: int) -> int:
        if value < MIN_ARENA_BYTES:
            raise ValueError(f"must be at least {format_bytes(MIN_ARENA_BYTES)}")
        return value
