"""The measurement of ENST's error: its estimates and its statistics."""

import importlib
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def enst(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("enst_error")


def test_without_finishing_it_is_the_core_s_estimate(enst: ModuleType) -> None:
    from fastserve_scheduler.core.enst import execute_ns

    quanta, sizes = [10, 20, 40, 80], [3, 0, 2, 5]
    assert enst.execute_ns(quanta, sizes, 2, [0.0] * 4) == execute_ns(quanta, sizes, 2)


def test_who_finishes_uses_half_a_quantum_and_goes_no_further(enst: ModuleType) -> None:
    # Four jobs in Q1, half of which end there: 4 * 10 * 3/4, then 2 * 20.
    assert enst.execute_ns([10, 20, 40], [4, 0, 0], 1, [0.5, 0.0, 0.0]) == [0, 30, 70]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [10, 20, 90], 1.0),
        ([1, 2, 3], [9, 5, 1], -1.0),
        ([1, 1, 1], [1, 2, 3], 0.0),
        ([1, 1, 2], [3, 3, 9], 1.0),
    ],
)
def test_rank_correlation(enst: ModuleType, left: list[float], right: list[float], expected: float) -> None:
    assert enst.rank_correlation(left, right) == pytest.approx(expected)


def test_a_short_simulation_is_observed(enst: ModuleType, tmp_path: Path) -> None:
    setting = enst.Setting(40, 6.0, 260, 4000, 2.0, 25.0)
    seen = enst.observe(setting, "order", 1)
    assert len(seen) > 20
    assert all(after_ns >= 0 and len(guess.estimates_ns) == len(enst.KINDS) for guess, after_ns in seen)
    mean, absolute, _, correlation = enst.summary(seen, 0)
    assert abs(mean) <= absolute
    assert -1 <= correlation <= 1
    enst.save_plot(seen, tmp_path / "e.png", "short")
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


def test_bars_of_a_simulation_do_not_overlap_in_a_row(enst: ModuleType, tmp_path: Path) -> None:
    swapping = importlib.import_module("scheduler_swapping")
    variant, setting = swapping.Variant("p", "proactive"), enst.Setting(40, 6.0, 260, 4000, 2.0, 25.0)
    simulated = swapping.simulator(variant, setting)
    simulated.keep_log = True
    result = simulated.run(swapping.poisson(40, 6.0, 1), setting.blocks, host_slots=setting.slots)
    bars = swapping.bars_of(result)
    assert {bar.what for bar in bars} == {"compute", "copy out", "copy in"}
    for what in ("compute", "copy out", "copy in"):
        row = sorted((bar.begin_s, bar.end_s) for bar in bars if bar.what == what)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(row))
    computed_s = sum(bar.end_s - bar.begin_s for bar in bars if bar.what == "compute")
    assert computed_s == pytest.approx(result.busy_ns[0] / 1e9)
    swapping.draw(variant, setting, tmp_path)
    assert (tmp_path / "swap_timeline_proactive.png").read_bytes().startswith(b"\x89PNG")
