"""Every accepted answer ends in exactly one way, the sums agree, and gauges are zero when nothing runs, whatever
happened: answers that finished, were left, were refused, took too long, and lost their stage and their scheduler."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import free_ports

from .system import PATIENCE_S, System, wait_until

pytestmark = pytest.mark.cluster

OUTCOMES = {"stop", "length", "abort", "timeout", "rejected", "error"}
#: Zero in a scheduler that has nothing to do.
IDLE_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_queued_tokens",
    "num_requests_resident",
    "num_requests_swapped",
    "batches_in_flight",
    "kv_blocks_used",
    "kv_cache_usage_perc",
    "host_slots_used",
    "swap_blocks_leaving",
    "longest_wait_seconds",
)
METRICS_PORT = free_ports(4)
SCHEDULER = f"127.0.0.1:{METRICS_PORT}"


@pytest.fixture
def system(fake_args: list[str], tmp_path: Path) -> Iterator[System]:
    flags = ["--max-num-queued-reqs=12", "--max-num-seqs=4", "--fake-iteration-ms=4", f"--metrics-port={METRICS_PORT}"]
    running = System(tmp_path / "system", *fake_args, *flags, env={"FASTSERVE_REQUEST_TIMEOUT": "8"})
    yield running
    running.destroy()


def metrics(address: str) -> dict[str, float]:
    """By name and labels other than the model; nothing while nobody answers there."""
    found: dict[str, float] = {}
    try:
        text = httpx.get(f"http://{address}/metrics", timeout=10).text
    except httpx.HTTPError:
        return found
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = ",".join(value for key, value in sorted(sample.labels.items()) if key != "model_name")
            found[f"{sample.name.removeprefix('fastserve:')}{{{rest}}}"] = sample.value
    return found


def stages_lost() -> float:
    return sum(value for name, value in metrics(SCHEDULER).items() if name.startswith("stages_lost_total"))


class Callers:
    def __init__(self, system: System) -> None:
        self._url = f"http://{system.http}/v1/completions"

    def whole(self, tokens: int, n: int = 1) -> int:
        """The status of an answer that is waited for."""
        body = {"prompt": "w1 w2 w3", "max_tokens": tokens, "n": n, "ignore_eos": True}
        return httpx.post(self._url, json=body, timeout=PATIENCE_S).status_code

    def left(self) -> int:
        """The status of an answer whose caller leaves after its first token."""
        body = {"prompt": "w1 w2", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=PATIENCE_S) as response:
            next(response.iter_bytes())
            return response.status_code


def test_every_accepted_answer_ends_in_exactly_one_way(system: System) -> None:
    system.wait_ready()
    callers = Callers(system)
    assert [callers.whole(3) for _ in range(3)] == [200] * 3
    assert [callers.left() for _ in range(3)] == [200] * 3
    assert callers.whole(4000) == 504, "longer than a request may take"
    assert callers.whole(30, n=60) == 429, "more than may wait"
    with ThreadPoolExecutor(10) as pool:
        stubborn = [pool.submit(callers.whole, 400) for _ in range(10)]
        wait_until(lambda: metrics(SCHEDULER).get("num_requests_running{}", 0) > 0, "some run", system)
        system.service("fastserve_worker", "--stage=1").kill()
        wait_until(lambda: stages_lost() > 0, "it is lost", system)
        system.service("fastserve_scheduler").kill()
        assert {future.result(PATIENCE_S) for future in stubborn} <= {200, 429, 503, 504}
    check_gateway(system)
    check_scheduler(system)


def check_gateway(system: System) -> None:
    def quiet() -> bool:
        found = metrics(system.http)
        return found["num_requests_running{}"] == found["num_requests_waiting{}"] == 0

    wait_until(quiet, "the gateway has nothing to do", system)
    found = metrics(system.http)
    ended = {outcome: found[f"request_success_total{{{outcome}}}"] for outcome in OUTCOMES}
    assert found["requests_accepted_total{}"] == sum(ended.values()) >= 3 + 3 + 1 + 60 + 1
    assert ended["length"] >= 3
    assert ended["abort"] >= 3
    assert ended["timeout"] >= 1
    assert ended["rejected"] >= 1
    assert found["generation_tokens_total{}"] == found["request_generation_tokens_sum{}"]
    assert found["prompt_tokens_total{}"] == found["request_prompt_tokens_sum{}"]
    assert 0 < found["request_max_num_generation_tokens_count{}"] <= found["request_params_n_count{}"]


def check_scheduler(system: System) -> None:
    def idle() -> bool:
        found = metrics(SCHEDULER)
        return bool(found) and not any(found.get(f"{name}{{}}") for name in IDLE_GAUGES)

    wait_until(idle, "the scheduler has nothing to do", system)
    found = metrics(SCHEDULER)
    assert {name for name in IDLE_GAUGES if f"{name}{{}}" not in found} == set()
    assert not any(value for name, value in found.items() if name.startswith(("queue_", "swaps_in_flight")))
    assert found["requests_accepted_total{}"] == found["requests_finished_total{}"]
    by_reason = sum(value for name, value in found.items() if name.startswith("request_success_total"))
    assert by_reason == found["requests_finished_total{}"] == found["request_queue_time_seconds_count{}"]
    assert found["request_prefill_time_seconds_count{}"] == found["request_inference_time_seconds_count{}"] > 0
    parts = found["request_prefill_time_seconds_sum{}"] + found["request_decode_time_seconds_sum{}"]
    assert found["request_inference_time_seconds_sum{}"] == pytest.approx(parts)
