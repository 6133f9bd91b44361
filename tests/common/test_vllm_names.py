"""What is repeated under vLLM's names, and with which labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fastserve_common.vllm_names import Alias, aliased


def samples(registry: CollectorRegistry) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_only_what_is_named_is_repeated_with_the_labels_of_vllm() -> None:
    registry = CollectorRegistry()
    Gauge("fastserve:ready", "Ours alone", registry=registry).set(1)
    preemptions = Counter("fastserve:num_preemptions", "Stopped", ["cause"], registry=registry)
    preemptions.labels("slots").inc(2)
    preemptions.labels("blocks").inc(3)
    found = samples(aliased(registry, [Alias("num_preemptions")], "a/model"))
    assert found["fastserve:ready"] == {(): 1}
    assert found["fastserve:num_preemptions_total"] == {(("cause", "slots"),): 2, (("cause", "blocks"),): 3}
    assert found["vllm:num_preemptions_total"] == {
        (("cause", "slots"), ("engine", "0"), ("model_name", "a/model")): 2,
        (("cause", "blocks"), ("engine", "0"), ("model_name", "a/model")): 3,
    }
    assert {name for name in found if name.startswith("vllm:")} == {
        "vllm:num_preemptions_total",
        "vllm:num_preemptions_created",
    }


def test_a_replica_is_an_engine() -> None:
    registry = CollectorRegistry()
    usage = Gauge("fastserve:kv_cache_usage_perc", "Used", ["replica"], registry=registry)
    usage.labels("0").set(0.25)
    usage.labels("1").set(0.5)
    found = samples(aliased(registry, [Alias("kv_cache_usage_perc")], "m"))
    assert found["vllm:kv_cache_usage_perc"] == {
        (("engine", "0"), ("model_name", "m")): 0.25,
        (("engine", "1"), ("model_name", "m")): 0.5,
    }


def test_one_value_of_a_label_can_be_a_family_of_its_own() -> None:
    registry = CollectorRegistry()
    sizes = Histogram("fastserve:swap_size_bytes", "Size", ["direction"], buckets=(10, 20), registry=registry)
    sizes.labels("out").observe(15)
    sizes.labels("in").observe(30)
    aliases = [
        Alias("swap_size_bytes", "kv_offload_store_size", ("direction", "out")),
        Alias("swap_size_bytes", "kv_offload_load_size", ("direction", "in")),
    ]
    found = samples(aliased(registry, aliases, "m"))
    whose = (("engine", "0"), ("model_name", "m"))
    assert found["vllm:kv_offload_store_size_sum"] == {whose: 15}
    assert found["vllm:kv_offload_load_size_sum"] == {whose: 30}
    assert found["vllm:kv_offload_store_size_bucket"] == {
        (("engine", "0"), ("le", "10.0"), ("model_name", "m")): 0,
        (("engine", "0"), ("le", "20.0"), ("model_name", "m")): 1,
        (("engine", "0"), ("le", "+Inf"), ("model_name", "m")): 1,
    }


def test_a_model_that_says_its_name_keeps_it() -> None:
    registry = CollectorRegistry()
    Gauge("fastserve:num_requests_running", "Running", ["model_name"], registry=registry).labels("m").set(4)
    found = samples(aliased(registry, [Alias("num_requests_running")], "m"))
    assert found["vllm:num_requests_running"] == {(("engine", "0"), ("model_name", "m")): 4}
