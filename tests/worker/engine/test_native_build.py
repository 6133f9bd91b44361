"""The kernels are built once, and their absence is one warning, not a failure, unless they are required."""

import logging
from pathlib import Path

import pytest
import torch

from fastserve_worker.engine.native import compiler, kernels
from fastserve_worker.engine.native.compiler import CACHE_VARIABLE, KernelsUnavailableError
from fastserve_worker.engine.native.kernels import MODE_VARIABLE, load_kernels


@pytest.fixture(autouse=True)
def _forget_loaded_kernels() -> None:
    kernels._load.cache_clear()


def test_off_means_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "off")
    assert load_kernels() is None


def test_without_a_compiler_torch_serves_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "auto")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
        assert load_kernels() is None
    assert [record.message for record in caplog.records] == [
        "native kernels are off, plain torch is several times slower: no C++ compiler (g++) is installed"
    ]


def test_required_kernels_fail_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "require")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(KernelsUnavailableError, match="the CPU offers DEFAULT"):
        load_kernels()


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "maybe")
    with pytest.raises(ValueError, match="must be one of"):
        load_kernels()


def test_a_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no space left >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(KernelsUnavailableError, match="no space left"):
        compiler.build()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cached_library_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counting = tmp_path / "counting"
    counting.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho built >> {tmp_path}/log\n'
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    counting.chmod(0o755)
    monkeypatch.setenv("CXX", str(counting))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert compiler.build() == compiler.build()
    assert (tmp_path / "log").read_text() == "built\n"
