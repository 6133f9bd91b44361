"""One list of fields, four sources, one order of precedence, and refusals that name the setting."""

import traceback
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from fastserve_common.settings import Settings, SettingsError
from fastserve_common.units import GIB, SizeBytes


class Example(Settings):
    """An example."""

    model: str = "small"
    port: int = Field(8000, ge=0, le=65535, description="where it listens")
    device: Literal["cpu", "cuda"] = "cpu"
    kv_memory: SizeBytes = Field(1 * GIB, description="memory for KV")
    api_key: tuple[Annotated[str, Field(min_length=1, max_length=20)], ...] = Field((), repr=False)
    eta: float | None = None
    fake: bool = False

    @model_validator(mode="after")
    def _combination(self) -> Self:
        if self.fake and self.device == "cuda":
            raise ValueError("--fake: a fake has no device, leave out --device")
        return self


def load(*argv: str) -> Example:
    return Example.load(argv, prog="example", positional="model")


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.toml"
    config.write_text('port = 1\nkv-memory = "2GiB"\ndevice = "cuda"\napi-key = ["a", "b"]\n')
    assert load("--config", str(config)).port == 1
    monkeypatch.setenv("FASTSERVE_PORT", "2")
    assert load("--config", str(config)).port == 2
    settings = load("--config", str(config), "--port", "3")
    assert settings == Example(port=3, kv_memory=2 * GIB, device="cuda", api_key=("a", "b"))


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text("fake = true\n")
    monkeypatch.setenv("FASTSERVE_CONFIG", str(tmp_path / "c.toml"))
    assert load().fake is True
    assert load("--no-fake").fake is False


def test_lists_come_from_repeated_flags_or_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--api-key", "x", "--api-key", "y").api_key == ("x", "y")
    monkeypatch.setenv("FASTSERVE_API_KEY", "p,q")
    assert load().api_key == ("p", "q")


def test_the_positional_is_optional() -> None:
    assert load("large").model == "large"
    assert load().model == "small"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "70000"], r"--port: .*less than or equal to 65535 \(got '70000'\)"),
        (["--device", "tpu"], r"--device: .*'cpu' or 'cuda' \(got 'tpu'\)"),
        (["--kv-memory", "much"], r"--kv-memory: expected a size such as 512MiB.*\(got 'much'\)"),
        (["--fake", "--device", "cuda"], r"--fake: a fake has no device"),
        (["--prt", "1"], r"unrecognized arguments: --prt"),
        (["--config", "/nowhere.toml"], r"--config: cannot read /nowhere.toml: No such file"),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence_that_names_it(argv: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load(*argv)


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_secret_is_never_repeated(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the sentence, nor in what a traceback of it would show, nor in a repr."""
    secret = "hunter2-and-much-too-long"
    (tmp_path / "c.toml").write_text(f'api-key = ["{secret}"]\n')
    if source == "environment":
        monkeypatch.setenv("FASTSERVE_API_KEY", secret)
    argv = {"flag": ["--api-key", secret], "environment": [], "file": ["--config", str(tmp_path / "c.toml")]}[source]
    with pytest.raises(SettingsError, match="--api-key: string should have at most 20 characters") as error:
        load(*argv)
    assert "hunter2" not in "".join(traceback.format_exception(error.value))
    assert "visible" not in repr(Example(api_key=("visible",)))


def test_an_unknown_key_and_broken_toml_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("prot = 1\n")
    with pytest.raises(SettingsError, match="sets prot, which is not a setting"):
        load("--config", str(config))
    config.write_text("port = = 1\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load("--config", str(config))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().port = 1  # type: ignore[misc]  # the point of the test


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        load("--help")
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert "where it listens (default: 8000)" in text
    assert "memory for KV (default: 1GiB)" in text
    assert all(flag in text for flag in ("--port", "--no-fake", "--api-key", "--log-level", "--config"))


words = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=20)


@given(
    port=st.integers(0, 65535),
    kv_memory=st.integers(0, 2**50),
    api_key=st.lists(words, max_size=3).map(tuple),
    eta=st.none() | st.floats(-10, 10),
    fake=st.booleans(),
)
def test_to_args_says_the_same_to_a_child(
    port: int, kv_memory: int, api_key: tuple[str, ...], eta: float | None, fake: bool
) -> None:
    settings = Example(port=port, kv_memory=kv_memory, api_key=api_key, eta=eta, fake=fake)
    assert load(*settings.to_args()) == settings
