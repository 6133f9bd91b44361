"""The parts of the GPU script that need no GPU, and what it says without one."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_overlap")


def test_a_block_is_as_large_as_asked(gpu: ModuleType) -> None:
    shape = gpu.Shape.of(2.0, 10)
    swapper = gpu.Swapper(shape, torch.device("cpu"), torch.float16)
    assert swapper.pool.block_bytes == 2 << 20
    assert (swapper.slab.num_slots, swapper.slab.block_bytes) == (10, 2 << 20)


def test_what_comes_back_is_what_left_and_a_damaged_block_is_found(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper = gpu.Swapper(gpu.Shape(300, 1, 1, 8), torch.device("cpu"), torch.float16)
    assert swapper.integrity() == []
    move = swapper.move

    def damaged(direction: object, blocks: range) -> object:
        swapper.slab.slot(271)[5] ^= 1
        return move(direction, blocks)

    monkeypatch.setattr(swapper, "move", damaged)
    assert swapper.integrity() == [271]


def test_copies_go_on_beside_the_work_in_both_directions(gpu: ModuleType) -> None:
    swapper = gpu.Swapper(gpu.Shape(8, 1, 1, 8), torch.device("cpu"), torch.float16)
    swapper.fill()
    times_s, copied = gpu.beside(lambda: swapper.move(gpu.SwapDirection.OUT, range(0, 1)), swapper, 20)
    assert len(times_s) == 20
    assert copied % swapper.pool.block_bytes == 0


def test_the_figures_are_ratios_of_means(gpu: ModuleType) -> None:
    text = gpu.report([0.010, 0.010], [0.011, 0.011], 2_200_000_000)
    assert text == ("iteration alone 10.00 ms, with both directions copying at 100.0 GB/s in all 11.00 ms: 1.100 times")


def test_the_whole_measurement_runs_on_a_cpu(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.measure(torch.device("cpu"), torch.float32, gpu.Shape(4, 1, 1, 8), 0.01, 2, side=16) == 0
    out = capsys.readouterr().out
    assert "all came back as they left" in out
    assert "times" in out


def test_without_a_device_it_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == gpu.EXIT_NO_DEVICE
    said = capsys.readouterr().err
    assert said == "gpu_overlap: there is no CUDA device that torch can use here; nothing was measured\n"
