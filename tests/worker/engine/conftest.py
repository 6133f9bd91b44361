"""One thread for the whole suite, and every tiny model made once."""

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers

from .models import TinyModel, make_model


@pytest.fixture(scope="session", autouse=True)
def _quiet_single_thread() -> Iterator[None]:
    """One thread, and none of transformers' notes about configurations."""
    verbosity, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Make, or find again, the tiny model of a name in MODEL_CONFIGS."""
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get
