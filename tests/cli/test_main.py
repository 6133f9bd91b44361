import importlib

import pytest

from fastserve.cli.main import COMMANDS, main


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.summary in text


def test_no_command_is_a_mistake_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fastserve 0.")


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    error = capsys.readouterr().err
    assert "no such command: sevre" in error
    assert "serve" in error


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_table_can_be_imported_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(importlib.import_module(COMMANDS[name].module).run)
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: fastserve {name}" in capsys.readouterr().out


def test_wrong_settings_are_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--policy", "fastest"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastserve: --policy: ")
    assert "skip-join-mlfq" in error
    assert error.count("\n") == 1
