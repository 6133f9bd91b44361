"""The tiny model of the service's tests."""

from ..service.conftest import MAX_MODEL_LEN, NUM_OUTPUT, TinyLlama, tiny_llama  # noqa: TID252 - the same model

__all__ = ["MAX_MODEL_LEN", "NUM_OUTPUT", "TinyLlama", "tiny_llama"]
