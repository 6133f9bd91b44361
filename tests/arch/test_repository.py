"""What may not be in the repository, and what its documents promise."""

import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from .repository import GENERATED, PACKAGES, ROOT, tracked_files

#: A machine's own paths have no business in a project that others clone. Spelled in pieces: this file is looked at too.
FORBIDDEN = re.compile(
    "|".join(["/" + "work/", "/" + "root/", "/" + "home/[a-z]", r"\.\./" + "shared", "find" + "-links"])
)

#: Unfinished work is finished or filed, not committed.
UNFINISHED = re.compile(
    r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) + r")\b|NotImplemented" + "Error"
)

TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".proto", ".yaml", ".yml", ".json", ".cpp", ".h", ""}


def texts() -> list[tuple[str, str]]:
    return [
        (str(path.relative_to(ROOT)), path.read_text())
        for path in tracked_files()
        if path.suffix in TEXT_SUFFIXES and path.stat().st_size < 1_000_000 and path.parent != GENERATED
    ]


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    assert [name for name, text in texts() if FORBIDDEN.search(text)] == []


def test_nothing_is_unfinished() -> None:
    assert [name for name, text in texts() if UNFINISHED.search(text)] == []


def test_every_requirement_is_pinned_and_none_is_a_url() -> None:
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line), f"{path.name}: {line}"


def test_the_serving_pins_satisfy_the_declared_dependencies() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements/serve.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["worker"]]
    declared += project["optional-dependencies"]["gateway"]
    names = {re.split(r"[<>=!\[ ]", requirement)[0].lower() for requirement in declared}
    assert names <= pinned


def test_every_package_is_built_and_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(Path(package).name for package in packages) == sorted(PACKAGES)
    assert all((ROOT / package / "py.typed").is_file() for package in packages)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_every_make_command_in_the_documents_exists() -> None:
    documents = [(name, text) for name, text in texts() if name.endswith(".md")]
    named = {(name, target) for name, text in documents for target in re.findall(r"`?\bmake ([a-z][a-z-]+)\b", text)}
    code = {(name, target) for name, target in named if _in_code(dict(documents)[name], f"make {target}")}
    assert code, "the README shows a command"
    assert {target for _, target in code} <= make_targets()


def test_every_link_between_documents_leads_somewhere() -> None:
    for name, text in texts():
        if name.endswith(".md"):
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
                assert ((ROOT / name).parent / target).exists(), f"{name}: {target}"


def test_the_committed_stubs_are_what_the_protos_generate(tmp_path: Path, skip_or_fail: Callable[[str], None]) -> None:
    if not (ROOT / ".venv-proto").is_dir():
        skip_or_fail("the generator is not installed; `make proto` installs it")
    (tmp_path / "fastserve/v1").mkdir(parents=True)
    subprocess.run([ROOT / "protos/generate.sh", tmp_path], check=True)
    for generated in sorted((tmp_path / "fastserve/v1").iterdir()):
        committed = ROOT / "sdk/fastserve/v1" / generated.name
        assert committed.read_text() == generated.read_text(), f"{generated.name}: run `make proto`"


def _in_code(text: str, command: str) -> bool:
    blocks = re.findall(r"```.*?```|`[^`\n]+`|^    [^\n]*$", text, re.DOTALL | re.MULTILINE)
    return any(command in block for block in blocks)


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md", "services/kvstore/README.md"])
def test_the_documents_are_there(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) > 20
