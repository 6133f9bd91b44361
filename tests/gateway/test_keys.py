"""Keys and hashes, from settings and from a file that changes while the gateway serves."""

import io
import logging
import os
from pathlib import Path

import pytest

from fastserve.cli import key as command
from fastserve.cli.main import main
from fastserve_common.errors import UnauthenticatedError
from fastserve_gateway.keys import MAX_FILE_BYTES, RELOAD_PERIOD_S, KeyCheck, KeyFile, digest_of

from .fake_scheduler import Script
from .rig import rig

KEY = "fsk-0123456789abcdefghij"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """As an editor or a kubelet would: another file under the name."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.chmod(mode)
    os.replace(other, path)
    return path


def lets_in(check: KeyCheck, key: str) -> bool:
    try:
        check.check(f"Bearer {key}")
    except UnauthenticatedError:
        return False
    return True


def test_a_key_and_its_hash_let_the_same_caller_in() -> None:
    for entry in (KEY, command.hash_of(KEY)):
        check = KeyCheck([entry])
        assert lets_in(check, KEY)
        assert not lets_in(check, KEY + "x")
        assert not lets_in(check, entry if entry != KEY else "")


def test_what_can_be_no_key_is_refused_without_showing_it() -> None:
    for entry in ("", "se cret", "sécret", "sha256:1234secret", "sha256:" + "g" * 64):
        with pytest.raises(ValueError, match=r"key|hash") as error:
            digest_of(entry)
        assert "cret" not in str(error.value)


def test_a_file_holds_keys_hashes_and_comments(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", f"# of team a\n{KEY}\n{command.hash_of('of-team-b-0123456789')} # b\nx,y\n\n")
    check = KeyCheck(["of-a-flag"], KeyFile(path))
    assert all(lets_in(check, key) for key in (KEY, "of-team-b-0123456789", "x", "y", "of-a-flag"))
    assert not lets_in(check, "of")


def test_plain_keys_that_everybody_may_read_are_refused_and_hashes_are_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="everybody may read it") as error:
        KeyFile(write(tmp_path / "keys", KEY, 0o644))
    assert KEY not in str(error.value)
    assert lets_in(KeyCheck([], KeyFile(write(tmp_path / "keys", command.hash_of(KEY), 0o644))), KEY)


@pytest.mark.parametrize("text", ["", "# nobody\n", "two words\n", "sha256:12\n", "x" * (MAX_FILE_BYTES + 1)])
def test_a_file_without_usable_keys_lets_nothing_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="keys"):
        KeyFile(write(tmp_path / "keys", text))


def test_a_changed_file_counts_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = write(tmp_path / "keys", "first-key")
    check = KeyCheck([], KeyFile(path, clock))
    write(path, "second-key")
    assert lets_in(check, "first-key"), "it is not looked at for every request"
    clock.now_s += RELOAD_PERIOD_S
    assert lets_in(check, "second-key")
    assert not lets_in(check, "first-key"), "a key that was taken out is out"
    for text, mode in (("no key", 0o600), ("third-key", 0o644), ("", 0o600)):
        write(path, text, mode)
        clock.now_s += RELOAD_PERIOD_S
        with caplog.at_level(logging.ERROR):
            assert lets_in(check, "second-key")
        assert "the keys stay as they were" in caplog.text
        caplog.clear()
    path.unlink()
    clock.now_s += RELOAD_PERIOD_S
    assert lets_in(check, "second-key")
    write(path, "fourth-key")
    clock.now_s += RELOAD_PERIOD_S
    assert lets_in(check, "fourth-key")


async def test_the_file_guards_http_and_grpc(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", command.hash_of(KEY))
    async with rig(tmp_path, Script(ids=[*b"ab"]), api_key_file=path) as r:
        assert (await r.http.get("/v1/models")).status_code == 401
        assert (await r.http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})).status_code == 200
        assert (await r.http.get("/health/ready")).status_code == 200


def test_the_command_makes_a_key_that_its_hash_lets_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    words = capsys.readouterr().out.split()
    key, hashed = words[1], words[3]
    assert lets_in(KeyCheck([hashed]), key)
    assert main(["key"]) == 0
    assert capsys.readouterr().out.split()[1] != key


def test_the_command_hashes_a_key_that_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(KEY + "\n"))
    assert main(["key", "--hash"]) == 0
    assert lets_in(KeyCheck([capsys.readouterr().out.strip()]), KEY)
    monkeypatch.setattr("sys.stdin", io.StringIO("guessable\n"))
    assert main(["key", "--hash"]) == 2
    assert "guessable" not in "".join(capsys.readouterr())
