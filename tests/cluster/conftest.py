from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .system import System
from .words import write_words

Start = Callable[..., System]


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured once, then known."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="session")
def fake_args(words: Path, profiles: Path) -> list[str]:
    return [
        str(words),
        "--fake",
        "--port=0",
        "--host-kv-memory=8MiB",
        "--kv-memory=64MiB",
        f"--profile-dir={profiles}",
        "--served-model-name=words",
    ]


@pytest.fixture
def start(tmp_path: Path, fake_args: list[str]) -> Iterator[Start]:
    """Start a system of fake stages, with more arguments."""
    systems: list[System] = []

    def run(*args: str) -> System:
        system = System(tmp_path / f"system-{len(systems)}", *fake_args, *args)
        systems.append(system)
        return system

    yield run
    for system in systems:
        system.destroy()
