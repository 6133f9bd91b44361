"""How many blocks of KV fit."""

from fastserve_common.settings import SettingsError
from fastserve_common.units import format_bytes


def count_blocks(*, kv_memory: int, block_bytes: int, block_size: int, max_model_len: int) -> int:
    """Blocks in `kv_memory`, where `block_bytes` is one block over all layers of the model: the same on every stage.

    Raises SettingsError when a single sequence of `max_model_len` tokens would not fit: it could never finish.
    """
    num_blocks = kv_memory // block_bytes
    needed = -(-max_model_len // block_size)
    if num_blocks >= needed:
        return num_blocks
    remedy = f"set --kv-memory to at least {needed * block_bytes} ({format_bytes(needed * block_bytes)})"
    if num_blocks:
        remedy += f", or --max-model-len to at most {num_blocks * block_size}"
    raise SettingsError(
        f"--kv-memory: {format_bytes(kv_memory)} holds {num_blocks * block_size} tokens, "
        f"less than one sequence of {max_model_len}: {remedy}"
    )
