"""What this gateway counts. Names, units and buckets are vLLM's under our prefix, so that existing boards fit.

An answer is one of a request's `n` (times prompts): what the scheduler calls a request. Every answer that was sent
to the scheduler ends in exactly one `finished_reason`, so `requests_accepted_total` minus the sum of
`request_success_total` over its reasons is what runs now.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from fastserve_common.vllm_names import PREFIX, Alias, aliased

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: What vLLM has too.
VLLM_ALIASES = tuple(
    Alias(name)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "request_success",
        "admission_rejections",
        "prompt_tokens",
        "generation_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
    )
)

#: Every way an answer can end.
OUTCOMES = ("stop", "length", "abort", "timeout", "rejected", "error")
#: What a request can be refused with 429 for: a limit of this gateway, of the scheduler, or of its caller's key.
LIMITS = (
    "max_concurrent_requests",
    "max_concurrent_requests_per_key",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "rate_limit",
)

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_ANSWERS = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    def __init__(self, model_name: str, *, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model_name}
        self._served = aliased(self.registry, VLLM_ALIASES, model_name) if vllm_names else self.registry
        self.accepted = self._counter("requests_accepted", "Answers sent to the scheduler")
        finished = self._counter_family("request_success", "Answers ended, by how", "finished_reason")
        self._finished = {outcome: finished.labels(**self._labels, finished_reason=outcome) for outcome in OUTCOMES}
        self._rejections = self._counter_family("admission_rejections", "Requests refused with 429, by limit", "reason")
        for limit in LIMITS:
            self._rejections.labels(**self._labels, reason=limit)
        self.quota_unchecked = self._counter(
            "rate_limit_unchecked", "Limits of a key left unchecked because the state store did not answer"
        )
        self._http = self._counter_family("http_requests", "HTTP requests answered", "path", "status")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended answers")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers, as billed")
        self.ttft_s = self._histogram("time_to_first_token_seconds", "Sent to first token", _TTFT_S)
        self.inter_token_s = self._histogram("inter_token_latency_seconds", "Between tokens of an answer", _TOKEN_S)
        self.token_s = self._histogram(
            "request_time_per_output_token_seconds", "First to last token over the tokens between, per answer", _TOKEN_S
        )
        self.e2e_s = self._histogram("e2e_request_latency_seconds", "Sent to ended", _REQUEST_S)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per answer", _TOKENS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Tokens per answer", _TOKENS)
        self.request_longest_answer = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer, where it got any", _TOKENS
        )
        self.request_max_tokens = self._histogram("request_params_max_tokens", "max_tokens per answer", _TOKENS)
        self.request_n = self._histogram("request_params_n", "n per request", _ANSWERS)

    def watch(
        self,
        *,
        running: Callable[[], float],
        waiting: Callable[[], float],
        connected: Callable[[], float],
        serving: Callable[[], bool],
        groups: Callable[[], Mapping[str, tuple[bool, int]]],
    ) -> None:
        """Gauges are read when they are scraped, so they cannot go stale. `serving`: requests get anywhere. `groups`:
        of each by name, whether it serves and how many answers are there.
        """
        self._gauge("num_requests_running", "Answers with a first token", running)
        self._gauge("num_requests_waiting", "Answers without a first token yet", waiting)
        self._waiting_by_reason(waiting, serving)
        self._gauge("scheduler_connected", "1 while a scheduler's stream is up", connected)
        self.registry.register(_GroupCollector(self._labels["model_name"], groups))

    def _waiting_by_reason(self, waiting: Callable[[], float], serving: Callable[[], bool]) -> None:
        """More capacity helps those that wait for it, and nobody while no scheduler serves."""
        text = "The same, by what they wait for: a turn, or a scheduler that serves"
        family = Gauge(
            PREFIX + "num_requests_waiting_by_reason", text, ("model_name", "reason"), registry=self.registry
        )
        family.labels(**self._labels, reason="capacity").set_function(lambda: waiting() if serving() else 0.0)
        family.labels(**self._labels, reason="deferred").set_function(lambda: 0.0 if serving() else waiting())

    def finished(self, outcome: str, *, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """Once per accepted answer."""
        self._finished[outcome].inc()
        if outcome == "rejected":
            return
        self.prompt_tokens.inc(prompt_tokens)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_generation_tokens.observe(tokens)
        self.e2e_s.observe(seconds)

    def admission_rejected(self, reason: str) -> None:
        """A limit was reached: this gateway's, or the scheduler's queue."""
        self._rejections.labels(**self._labels, reason=reason).inc()

    def http(self, path: str, status: int) -> None:
        self._http.labels(**self._labels, path=path, status=str(status)).inc()

    # --- for the page

    def totals(self) -> dict[str, int]:
        """Accepted answers, and tokens of answers, since the gateway began."""
        counters = {"accepted": self.accepted, "prompt_tokens": self.prompt_tokens, "tokens": self.generation_tokens}
        return {name: int(_samples(counter, "_total")[0].value) for name, counter in counters.items()}

    def outcomes(self) -> dict[str, int]:
        """Ended answers by how they ended."""
        return {outcome: int(_samples(counter, "_total")[0].value) for outcome, counter in self._finished.items()}

    def latencies(self) -> dict[str, tuple[list[float], list[int]]]:
        """Bounds in seconds, and for each how many were at most that; the last count is of all."""
        shown = {"time_to_first_token": self.ttft_s, "inter_token": self.inter_token_s, "end_to_end": self.e2e_s}
        return {name: _cumulative(histogram) for name, histogram in shown.items()}

    def render(self) -> bytes:
        return generate_latest(self._served)

    def _counter_family(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counter_family(name, text).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return family.labels(**self._labels)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(PREFIX + name, text, ("model_name",), registry=self.registry).labels(**self._labels).set_function(read)


class _GroupCollector(Collector):
    """Groups come and go."""

    def __init__(self, model_name: str, read: Callable[[], Mapping[str, tuple[bool, int]]]) -> None:
        self._model_name, self._read = model_name, read

    def describe(self) -> list[Metric]:
        """Registering must not ask."""
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "group")
        ready = GaugeMetricFamily(f"{PREFIX}group_ready", "1 while requests may go to a group", labels=labels)
        live = GaugeMetricFamily(f"{PREFIX}group_requests", "Answers in progress by group", labels=labels)
        for group, (serves, num_live) in self._read().items():
            ready.add_metric((self._model_name, group), float(serves))
            live.add_metric((self._model_name, group), num_live)
        yield from (ready, live)


def _samples(metric: Counter | Histogram, suffix: str) -> list[Sample]:
    return [s for family in metric.collect() for s in family.samples if s.name.endswith(suffix)]


def _cumulative(histogram: Histogram) -> tuple[list[float], list[int]]:
    buckets = _samples(histogram, "_bucket")
    return [float(bucket.labels["le"]) for bucket in buckets[:-1]], [int(bucket.value) for bucket in buckets]
