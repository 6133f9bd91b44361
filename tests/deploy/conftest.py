"""Tools that not every machine has."""

import importlib.util
import shutil
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def need(skip_or_fail: Callable[[str], None]) -> Callable[[str], None]:
    """`need("promtool")`, a program or a Python module: skips where it is not installed."""

    def check(tool: str) -> None:
        if shutil.which(tool) is None and importlib.util.find_spec(tool) is None:
            skip_or_fail(f"{tool} is not installed; see `make test-infra`")

    return check
