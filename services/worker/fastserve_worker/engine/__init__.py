"""The tensors of one pipeline stage: its layers, its paged KV pool, its ragged batches. Nothing here knows a wire."""

from fastserve_worker.engine.batch import BatchRow, PagedBatch
from fastserve_worker.engine.errors import UnsupportedModelError
from fastserve_worker.engine.kv_pool import KvPool
from fastserve_worker.engine.shape import ModelShape
from fastserve_worker.engine.stage_model import StageModel

__all__ = ["BatchRow", "KvPool", "ModelShape", "PagedBatch", "StageModel", "UnsupportedModelError"]
