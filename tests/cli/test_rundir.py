import os
from pathlib import Path

import pytest

from fastserve.cli.rundir import RunDir, remove_abandoned
from fastserve_common.settings import SettingsError


def test_a_temporary_folder_goes_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_dir = RunDir.open(None)
    assert run_dir.path.parent == tmp_path
    assert run_dir.log_path("gateway").parent.is_dir()
    assert run_dir.state_url == f"sqlite://{run_dir.path}/state.db"
    run_dir.close()
    run_dir.close()
    assert list(tmp_path.iterdir()) == []


def test_a_given_folder_stays_but_its_old_members_go(tmp_path: Path) -> None:
    given = tmp_path / "run"
    RunDir.open(given).close()
    (given / "state.db").write_text("members of an earlier run")
    (given / "logs" / "gateway.log").write_text("kept")
    RunDir.open(given).close()
    assert not (given / "state.db").exists()
    assert (given / "logs" / "gateway.log").read_text() == "kept"


def test_one_run_per_folder(tmp_path: Path) -> None:
    first = RunDir.open(tmp_path)
    with pytest.raises(SettingsError, match="in use by another fastserve"):
        RunDir.open(tmp_path)
    first.close()
    RunDir.open(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="--run-dir: cannot use"):
        RunDir.open(tmp_path / "file" / "run")


def test_folders_of_killed_runs_are_removed_and_of_living_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, killed, young = RunDir.open(None), RunDir.open(None), RunDir.open(None)
    for run_dir in (living, killed):
        (run_dir.path / "state.db").touch()
    for run_dir in (killed, young):
        os.close(run_dir._lock_fd)  # as the kernel does for a process that was killed
    (tmp_path / "fastserve-something-else").mkdir()
    assert remove_abandoned(tmp_path) == [killed.path]
    assert living.path.exists()
    assert young.path.exists(), "without a state yet it may be just being made"
    living.close()
