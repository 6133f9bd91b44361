"""What boards, autoscalers and routers made for vLLM find here: its names, its labels, its buckets, each once."""

import functools
from collections.abc import Mapping
from math import inf

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from .exposed import expositions

#: Those of vLLM that have a meaning here; prefix caches, LoRA, speculation and sleep have none.
BY_GATEWAY = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "request_success": "counter",
    "admission_rejections": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
}
BY_SCHEDULER = {
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "num_requests_swapped": "gauge",
    "num_preemptions": "counter",
    "iteration_tokens_total": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "kv_offload_load_bytes": "counter",
    "kv_offload_load_time": "counter",
    "kv_offload_load_size": "histogram",
    "kv_offload_store_bytes": "counter",
    "kv_offload_store_time": "counter",
    "kv_offload_store_size": "histogram",
}

REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
TOKENS = tuple(mantissa * 10**power for power in range(5) for mantissa in (1, 2, 5))
SIZE_BYTES = tuple(mega * 1e6 for mega in (1, 5, 10, 20, 40, 60, 80, 100, 150, 200))
#: Where theirs is not the one of all request times.
BUCKETS = {
    "time_to_first_token_seconds": FIRST_TOKEN_S,
    "inter_token_latency_seconds": TOKEN_S,
    "request_time_per_output_token_seconds": TOKEN_S,
    "request_params_n": (1, 2, 5, 10, 20),
    "iteration_tokens_total": (1, *(2**power for power in range(3, 15))),
    "kv_offload_load_size": SIZE_BYTES,
    "kv_offload_store_size": SIZE_BYTES,
    **dict.fromkeys(
        (
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_prefill_kv_computed_tokens",
        ),
        TOKENS,
    ),
}


@functools.cache
def theirs(job: str) -> Mapping[str, Metric]:
    """Families of vLLM's by name; a counter's stamps, which the client library makes families of, are left out."""
    families = {
        family.name.removeprefix("vllm:"): family
        for family in text_string_to_metric_families(expositions()[job].decode())
        if family.name.startswith("vllm:")
    }
    return {name: family for name, family in families.items() if not name.endswith("_created")}


@pytest.mark.parametrize(
    ("job", "names"),
    [("fastserve-gateway", BY_GATEWAY), ("fastserve-scheduler", BY_SCHEDULER), ("fastserve-stage", {})],
)
def test_each_service_repeats_what_vllm_has_and_it_owns(job: str, names: dict[str, str]) -> None:
    assert {name: family.type for name, family in theirs(job).items()} == names


def test_nothing_is_repeated_twice() -> None:
    assert not set(BY_GATEWAY) & set(BY_SCHEDULER)


@pytest.mark.parametrize("job", ["fastserve-gateway", "fastserve-scheduler"])
def test_every_sample_says_which_model_and_engine(job: str) -> None:
    for family in theirs(job).values():
        assert family.samples, family.name
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("a-model", "0"), sample


@pytest.mark.parametrize("job", ["fastserve-gateway", "fastserve-scheduler"])
def test_histograms_have_all_of_vllm_s_buckets(job: str) -> None:
    for name, family in theirs(job).items():
        if family.type == "histogram":
            bounds = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
            assert bounds >= {*BUCKETS.get(name, REQUEST_S), inf}, name


def test_values_are_those_of_ours() -> None:
    families = {
        family.name: family for family in text_string_to_metric_families(expositions()["fastserve-scheduler"].decode())
    }
    ours, again = families["fastserve:cache_config_info"].samples, families["vllm:cache_config_info"].samples
    assert [sample.value for sample in ours] == [sample.value for sample in again] == [1]
    assert again[0].labels == {**ours[0].labels, "engine": "0", "model_name": "a-model"}
    assert ours[0].labels == {"block_size": "16", "num_gpu_blocks": "100", "num_cpu_blocks": "0"}
