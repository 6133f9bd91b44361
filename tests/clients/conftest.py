"""Clients that nobody here wrote run in an environment of their own: their pins are none of ours."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.conftest import fake_args, profiles, start, words

__all__ = ["fake_args", "profiles", "start", "words"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def python(skip_or_fail: Callable[[str], None]) -> Path:
    """The interpreter that has them: `make clients`, or $FASTSERVE_CLIENTS_PYTHON."""
    path = Path(os.environ.get("FASTSERVE_CLIENTS_PYTHON", ROOT / ".venv-clients/bin/python"))
    if not path.exists():
        skip_or_fail("no environment with clients: make clients")
    return path
