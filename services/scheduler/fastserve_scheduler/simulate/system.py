"""From settings to a system: what computes, how much it holds, how it is configured."""

import math

from fastserve_common.settings import SettingsError
from fastserve_scheduler.profile_file import ProfileFileError, StoredProfile, read_profile
from fastserve_scheduler.sim import study
from fastserve_scheduler.sim.cost import LinkCost
from fastserve_scheduler.sim.devices import DEVICES
from fastserve_scheduler.sim.fleet import Plant
from fastserve_scheduler.sim.measured import ProfileCost
from fastserve_scheduler.sim.models import MODELS, ModelShape
from fastserve_scheduler.sim.replica import Control
from fastserve_scheduler.sim.roofline import RooflineCost
from fastserve_scheduler.simulate.settings import DEFAULT_MODEL, SimulateSettings

AMPLE_TOKENS = 1 << 20
"""KV on the device of a profiled system of which no more is known."""

_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


def build(settings: SimulateSettings) -> tuple[str, Plant]:
    """The system's name, and one replica of it. Raises SettingsError with a sentence that names the flag."""
    if settings.profile is not None:
        return _profiled(settings)
    shape = MODELS[settings.model or DEFAULT_MODEL]
    try:
        cost = RooflineCost(shape, DEVICES[settings.device], settings.tp, settings.pp)
        kv_tokens = cost.free_kv_bytes() // cost.kv_bytes_per_token
    except ValueError as error:
        raise SettingsError(f"--device, --tp, --pp: {error}") from error
    max_model_len = settings.max_model_len or shape.max_len
    stage_block_bytes = cost.stage_kv_bytes_per_token() * settings.block_size
    config = settings.core(max_model_len, stage_block_bytes)
    num_blocks, host_slots = _memory(settings, kv_tokens, cost.kv_bytes_per_token)
    bandwidth = cost.device.host_bytes_per_second
    plant = Plant(
        config=config,
        profile=cost.profile(max_model_len, config.max_batch_size),
        cost=cost,
        num_blocks=num_blocks,
        host_slots=host_slots,
        link=_link(settings, stage_block_bytes, bandwidth),
        control=_control(settings),
    )
    return shape.name, plant


def _profiled(settings: SimulateSettings) -> tuple[str, Plant]:
    assert settings.profile is not None
    try:
        stored = read_profile(settings.profile)
    except ProfileFileError as error:
        raise SettingsError(f"--profile: {error}") from error
    longest = stored.profile.prefill[-1][0]
    max_model_len = settings.max_model_len or longest + 1
    shape = MODELS[settings.model] if settings.model else None
    token_bytes = _token_bytes(settings, stored, shape)
    stage_block_bytes = math.ceil(token_bytes / settings.pp) * settings.block_size
    num_blocks, host_slots = _memory(settings, AMPLE_TOKENS, token_bytes)
    cost = ProfileCost(stored.profile, settings.stage_share or (1 / settings.pp,) * settings.pp)
    plant = Plant(
        config=settings.core(max_model_len, stage_block_bytes),
        profile=stored.profile,
        cost=cost,
        num_blocks=num_blocks,
        host_slots=host_slots,
        link=_link(settings, stage_block_bytes, DEVICES["cpu"].host_bytes_per_second),
        control=_control(settings),
    )
    return settings.model or stored.fingerprint, plant


def _token_bytes(settings: SimulateSettings, stored: StoredProfile, shape: ModelShape | None) -> int:
    """KV of one token, 0 when nobody can know."""
    if shape is not None:
        return shape.kv_elements_per_token * _BYTES_OF.get(stored.dtype, 4)
    if settings.kv_memory is not None or settings.host_kv_memory:
        raise SettingsError("--kv-memory, --host-kv-memory: with --profile they need --model; or give --kv-tokens")
    return 0


def _memory(settings: SimulateSettings, default_tokens: int, token_bytes: int) -> tuple[int, int]:
    """Blocks on the device and on the host."""
    tokens = settings.kv_tokens or default_tokens
    if settings.kv_memory is not None:
        tokens = settings.kv_memory // token_bytes
    host_tokens = settings.host_kv_tokens
    if settings.host_kv_memory:
        host_tokens = settings.host_kv_memory // token_bytes
    if tokens < settings.block_size:
        raise SettingsError(f"--kv-memory: holds {tokens} tokens, less than a block of {settings.block_size}")
    return tokens // settings.block_size, host_tokens // settings.block_size


def _link(settings: SimulateSettings, stage_block_bytes: int, bandwidth: int) -> LinkCost:
    if settings.link_bandwidth is not None:
        bandwidth = max(1, round(settings.link_bandwidth * 1e9))
    return LinkCost(stage_block_bytes, bandwidth, study.LINK_LATENCY_NS)


def _control(settings: SimulateSettings) -> Control:
    turn_us, hop_us, job_us = settings.turn_us, settings.hop_us, settings.turn_job_us
    return Control(round(turn_us * 1000), round(hop_us * 1000), round(job_us * 1000))
