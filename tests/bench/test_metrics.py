"""Every metric, exactly, on runs small enough to check by hand."""

from datetime import UTC, datetime

import pytest

from fastserve.bench.metrics import Outcome, Run
from fastserve.bench.result import Setup, to_result
from fastserve.bench.runner import Measured
from fastserve_common.load.classes import length_class, length_class_name


def outcome(sent_s: float, *arrivals_s: float, output: int | None = None, end_s: float | None = None) -> Outcome:
    return Outcome(
        planned_s=sent_s,
        released_s=sent_s,
        sent_s=sent_s,
        arrival_s=list(arrivals_s),
        token_counts=[1] * len(arrivals_s),
        end_s=arrivals_s[-1] if end_s is None else end_s,
        input_tokens=10,
        output_tokens=len(arrivals_s) if output is None else output,
    )


def setup(**changes: object) -> Setup:
    values = {
        "backend": "openai",
        "endpoint_type": "openai",
        "model_id": "m",
        "tokenizer_id": "t",
        "num_prompts": 3,
        "request_rate": 2.0,
        "arrivals": "gamma",
        "burstiness": 1.0,
    }
    return Setup(**(values | changes))  # type: ignore[arg-type]  # a test's shorthand


A = outcome(0.0, 0.5, 0.7, 1.5)  # ttft .5, gaps .2 .8, latency 1.5, tpot .5, normalised .5
B = outcome(1.0, 1.25)  # ttft .25, latency .25, one token
C = outcome(1.0, 2.0, 3.0, output=4, end_s=3.5)  # two pieces for four tokens, then a closing event
FAILED = Outcome(sent_s=0.0, end_s=9.0, input_tokens=99, output_tokens=1, arrival_s=[1.0], error="boom")
RUN = Run([A, B, FAILED, C], duration_s=4.0)


def test_one_request() -> None:
    assert (A.ttft_s, A.latency_s, A.tpot_s, A.normalised_s) == (0.5, 1.5, 0.5, 0.5)
    assert A.gaps_s == pytest.approx([0.2, 0.8])
    assert (B.tpot_s, B.normalised_s, B.gaps_s) == (0.0, 0.25, [])
    assert C.tpot_s == pytest.approx((2.5 - 1.0) / 3)
    assert C.normalised_s == 2.5 / 4


def test_lag_and_client_queue_are_apart() -> None:
    late = Outcome(planned_s=1.0, released_s=3.0, sent_s=3.5)
    assert (late.queue_s, late.lag_s) == (2.0, 0.5)


def test_failed_requests_count_nowhere_else() -> None:
    assert RUN.failed == 1
    assert (RUN.input_tokens, RUN.output_tokens) == (30, 8)


def test_samples() -> None:
    assert RUN.samples_s("ttft") == [0.25, 0.5, 1.0]
    assert RUN.samples_s("tpot") == pytest.approx([0.5, 0.5])  # B has no time per output token
    assert RUN.samples_s("itl") == pytest.approx([0.2, 0.8, 1.0])
    assert RUN.samples_s("e2el") == [0.25, 1.5, 2.5]
    assert RUN.normalised_s() == [0.25, 0.5, 0.625]
    assert RUN.longest_gaps_s() == pytest.approx([0.8, 1.0])


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 500}, 2),
        ({"ttft": 500, "e2el": 1000}, 1),
        ({"tpot": 499}, 1),  # one token: counts as 0
        ({"tpot": 501}, 3),
        ({"ttft": 1}, 0),
    ],
)
def test_goodput_needs_every_limit(limits: dict[str, float], good: int) -> None:
    assert RUN.num_good(limits) == good


def test_peaks() -> None:
    assert RUN.peak_concurrency() == 4  # at 1.0: A, FAILED, B and C
    counted = outcome(0.0, 0.1, 0.2, 1.1)
    counted.token_counts, counted.output_tokens = [3, 4, 5], 12
    assert Run([counted], 2.0).peak_output_tokens_per_s() == 7


def test_tokens_are_spread_over_pieces_that_do_not_count_them() -> None:
    assert C.token_arrivals() == [(2.0, 2.0), (3.0, 2.0)]
    assert sum(tokens for _, tokens in A.token_arrivals()) == A.output_tokens


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(0, "1-15"), (1, "1-15"), (15, "1-15"), (16, "16-63"), (64, "64-255"), (1023, "256-1023"), (9999, "1024+")],
)
def test_length_classes(tokens: int, name: str) -> None:
    assert length_class_name(length_class(tokens)) == name


def test_classes_and_fairness() -> None:
    short, long = outcome(0.0, 1.0), outcome(0.0, 1.0, output=20, end_s=40.0)
    run = Run([long, short, short], 40.0)
    assert {name: len(group) for name, group in run.by_length_class().items()} == {"1-15": 2, "16-63": 1}
    assert run.fairness() == pytest.approx((1 + 2) ** 2 / (2 * (1 + 4)))


SHARED_KEYS = (
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
)
STATISTICS = ("mean", "median", "std", "p95", "p99")


def result(detailed: bool = False, **changes: object) -> dict[str, object]:
    date = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return to_result(setup(**changes), Measured(RUN, cpu_s=0.5), date, detailed=detailed)


def test_the_keys_that_serving_benchmarks_share() -> None:
    found = result()
    for key in (*SHARED_KEYS, *(f"{s}_{m}_ms" for s in STATISTICS for m in ("ttft", "tpot", "itl", "e2el"))):
        assert key in found
    assert found["date"] == "20260102-030405"
    assert found["completed"] == 3
    assert found["request_throughput"] == 0.75
    assert found["output_throughput"] == 2.0
    assert found["total_token_throughput"] == 9.5
    assert found["request_goodput"] is None
    assert found["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert found["median_e2el_ms"] == 1500
    assert found["p99_itl_ms"] == pytest.approx(996)


def test_what_we_add_is_named_apart() -> None:
    found = result(slo_ms={"ttft": 500.0})
    assert found["request_goodput"] == 0.5
    assert found["mean_normalised_latency"] == pytest.approx(1.375 / 3)
    assert found["p95_normalised_latency"] == pytest.approx(0.6125)
    assert found["longest_gap_ms"] == 1000
    assert found["client_cpu_us_per_token"] == 0.5e6 / 8
    assert found["client_saturated"] is False
    assert found["by_output_length"]["1-15"]["completed"] == 3  # type: ignore[index]  # it is a table


def test_only_the_metrics_asked_for() -> None:
    found = result(metrics=("ttft",), percentiles=(50.0, 99.9))
    assert "p99.9_ttft_ms" in found
    assert "p50_ttft_ms" in found
    assert not any(key.endswith("itl_ms") for key in found)


def test_optional_keys() -> None:
    assert not any("client_queue" in key for key in result())
    found = result(max_concurrency=2, metadata={"gpu": "none"}, ramp_up={"ramp_up_start_rps": 1.0})
    assert found["gpu"] == "none"
    assert found["ramp_up_start_rps"] == 1.0
    assert found["mean_client_queue_time_ms"] == 0.0
    assert found["mean_e2el_including_client_queue_ms"] == found["mean_e2el_ms"]


def test_details_have_one_entry_per_request() -> None:
    found = result(detailed=True)
    assert found["errors"] == ["", "", "boom", ""]
    for key in (
        "input_lens",
        "output_lens",
        "ttfts",
        "itls",
        "start_times",
        "generated_texts",
        "latencies",
        "queue_times",
    ):
        assert len(found[key]) == 4  # type: ignore[arg-type]  # it is a list
        assert key not in result()


@pytest.mark.parametrize(
    ("lag_s", "cpu_s", "arrivals", "saturated"),
    [(0.0, 0.1, "gamma", False), (0.2, 0.1, "gamma", True), (0.2, 0.1, "at-once", False), (0.0, 3.9, "gamma", True)],
)
def test_a_client_that_is_too_slow_is_noticed(lag_s: float, cpu_s: float, arrivals: str, saturated: bool) -> None:
    late = Outcome(sent_s=lag_s, arrival_s=[1.0], token_counts=[1], end_s=1.0, output_tokens=1)
    found = to_result(setup(arrivals=arrivals), Measured(Run([late], 4.0), cpu_s), datetime.now(UTC))
    assert found["client_saturated"] is saturated


def test_a_run_without_any_answer_is_all_zeros() -> None:
    found = to_result(setup(), Measured(Run([FAILED], 1.0), 0.0), datetime.now(UTC))
    assert found["completed"] == 0
    assert found["mean_ttft_ms"] == found["p99_itl_ms"] == found["mean_normalised_latency"] == 0.0
