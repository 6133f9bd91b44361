from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from .models import make_model
from .oracle import Oracle


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dir("llama")`: made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
            torch.set_num_threads(1)
            made[kind] = make_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def oracle(model_dir: Callable[[str], Path]) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def get(kind: str) -> Oracle:
        if kind not in made:
            made[kind] = Oracle(model_dir(kind))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured once for all clusters of one shape."""
    return tmp_path_factory.mktemp("profiles")
