"""Flags: what they make of the core's configuration, and the sentences for wrong ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from fastserve_common.settings import SettingsError
from fastserve_scheduler.core.config import CoreConfig, MlfqConfig
from fastserve_scheduler.messages import Ready
from fastserve_scheduler.settings import SchedulerSettings

READY = Ready(1, 0, 1, 256, 16, 2048, 1000, "model", 1024, "cpu", "float32")


def load(*flags: str) -> SchedulerSettings:
    return SchedulerSettings.load(["--state", "sqlite:///x", *flags], prog="test")


def test_defaults_follow_the_stages() -> None:
    assert load().core_config([READY]) == CoreConfig(
        num_stages=1,
        block_size=16,
        max_batch_size=16,
        max_batch_tokens=2048,
        max_model_len=2048,
        prefill_chunk_tokens=512,
        mlfq=MlfqConfig(),
        kv_block_bytes=1024,
    )


def test_every_flag_reaches_the_core() -> None:
    flags = (
        *("--num-stages", "2", "--policy", "naive-mlfq", "--alpha-ms", "0.5", "--promotion", "return"),
        *("--quantum-ratio", "3", "--num-queues", "7", "--eta", "2", "--demote-when", "used-exceeds"),
        *("--service-class", "fast=10", "--service-class", "slow=2e3", "--kv-policy", "defer", "--kv-ranking", "enst"),
        *("--max-num-seqs", "5", "--max-num-batched-tokens", "99", "--prefill-chunk-tokens", "33"),
        *("--max-model-len", "1000", "--max-num-queued-reqs", "11", "--max-num-queued-tokens", "2000"),
        *("--charge", "share", "--after-prefill", "top", "--alpha-rounds", "8", "--probe-tokens", "4"),
        *("--slo-first-token-ms", "500", "--slo-token-ms", "50", "--slack-step-ms", "1000"),
    )
    mlfq = MlfqConfig(
        ratio=3,
        num_levels=7,
        eta=2,
        alpha_ns=500_000,
        promotion="return",
        demote_when="used-exceeds",
        charge="share",
        after_prefill="top",
        alpha_rounds=8,
    )
    wider = replace(READY, kv_block_bytes=2048)
    assert load(*flags).core_config([READY, wider]) == CoreConfig(
        num_stages=2,
        block_size=16,
        max_batch_size=5,
        max_batch_tokens=99,
        max_model_len=1000,
        prefill_chunk_tokens=33,
        max_waiting_jobs=11,
        max_waiting_tokens=2000,
        policy="naive-mlfq",
        mlfq=mlfq,
        service_classes=(("fast", 10_000_000), ("slow", 2_000_000_000)),
        kv_policy="defer",
        kv_ranking="enst",
        kv_block_bytes=2048,
        slo_first_token_ns=500_000_000,
        slo_token_ns=50_000_000,
        slack_step_ns=1_000_000_000,
        probe_tokens=4,
    )


def test_long_prompts_are_cut_unless_told_otherwise() -> None:
    assert load().core_config([READY]).prefill_chunk_tokens == 512
    assert load("--max-num-batched-tokens", "100").core_config([READY]).prefill_chunk_tokens == 100
    assert load("--prefill-chunk-tokens", "0").core_config([READY]).prefill_chunk_tokens == 0


def test_a_flag_wins_over_the_preset() -> None:
    assert load("--preset", "paper").mlfq_config().alpha_ns == 300_000_000
    assert load("--preset", "paper", "--alpha-ms", "7").mlfq_config().alpha_ns == 7_000_000


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--policy", "best"], r"^--policy: must be one of skip-join-mlfq, .*\(got 'best'\)$"),
        (["--kv-policy", "magic"], r"^--kv-policy: must be one of "),
        (["--alpha-ms", "0"], r"^--alpha-ms: .*greater than 0"),
        (["--max-num-seqs", "many"], r"^--max-num-seqs: .*integer.*\(got 'many'\)$"),
        (["--listen", "here"], r"^--listen: expected HOST:PORT"),
        (["--service-class", "fast"], r"^--service-class: expected NAME=MS"),
        (["--service-class", "a=1", "--service-class", "a=2"], r"^--service-class: a name is given twice"),
        (["--prefill-chunk-tokens", "5000"], r"^--prefill-chunk-tokens must not exceed --max-num-batched-tokens$"),
        (["--max-model-len", "9", "--max-num-queued-tokens", "8"], r"^--max-num-queued-tokens must hold"),
        (["--preset", "mine"], r"^--preset: "),
        (["--vllm-metric-names"], r"^--vllm-metric-names needs --served-model-name"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence_that_names_the_flag(flags: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load(*flags)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max-model-len", "2049"], "--max-model-len: the stages serve at most 2048"),
        (["--max-num-queued-tokens", "100"], "--max-num-queued-tokens: must hold one prompt of 2048"),
    ],
)
def test_what_the_stages_cannot_serve_is_refused_with_a_sentence(flags: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load(*flags).core_config([READY])


def test_metrics_under_vllm_s_names_are_of_the_first_name() -> None:
    names = ("--served-model-name", "a", "--served-model-name", "b")
    assert load("--vllm-metric-names", *names).vllm_model == "a"
    assert load(*names).vllm_model == "", "not asked for"


def test_settings_survive_being_handed_to_a_child() -> None:
    settings = load("--promotion", "return", "--service-class", "a=1", "--check", "--journal", "/j", "--alpha-ms", "3")
    assert SchedulerSettings.load(settings.to_args(), prog="test") == settings


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ([], "127.0.0.1:9"),
        (["--listen", "10.1.2.3:50", "--advertise", "name"], "name:9"),
    ],
)
def test_the_address_others_are_told(flags: list[str], address: str) -> None:
    assert load(*flags).address(9) == address


def test_an_address_that_means_every_one_is_not_what_others_are_told() -> None:
    assert not load("--listen", "0.0.0.0:1").address(9).startswith("0.0.0.0")


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert load().profile_dir == Path("/somewhere/.cache/fastserve/profiles")


def test_the_stages_longest_is_taken_from_the_stages() -> None:
    assert load().core_config([replace(READY, max_model_len=77)]).max_model_len == 77
