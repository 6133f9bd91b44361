import pytest

from fastserve_gateway import shared


@pytest.fixture(autouse=True)
def patient_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway lets requests through when the store is slow; here that is the machine. Tests of it set their own."""
    monkeypatch.setattr(shared, "ASK_TIMEOUT_S", 60.0)
