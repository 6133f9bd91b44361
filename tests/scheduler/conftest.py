"""What every test of the live scheduler wants."""

import pytest

from fastserve_scheduler import pipeline

#: Stages that come back are found at once, so that the many tests that kill one are quick.
POLL_S = 0.02


@pytest.fixture(autouse=True)
def _find_stages_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POLL_S", POLL_S)
