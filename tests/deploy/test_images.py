"""The Dockerfiles, as far as they can be checked without an engine."""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fastserve.cli.specs import SERVICE_ENVIRONMENT

from .dockerfile import ROOT, SERVICES, images, instructions, serving_image
from .services import load

#: What a service cannot start without and no image can know.
GIVEN = {
    "gateway": ["--state=redis://redis:6379/0", "--model-dir=/models/served"],
    "kvstore": ["--state=redis://redis:6379/0"],
    "scheduler": ["--state=redis://redis:6379/0"],
    "worker": ["--state=redis://redis:6379/0", "--model-dir=/models/served"],
}
REQUIREMENTS = {"gateway": "gateway.txt", "kvstore": "base.txt", "scheduler": "base.txt", "worker": "serve.txt"}


def pins(name: str) -> dict[str, str]:
    """Of a requirements file and those that it includes."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            package, _, version = line.partition("==")
            found[canonical(package)] = version
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str]) -> set[str]:
    """These packages and what they need in turn, as what is installed here says."""
    names: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    open_ends = [Requirement(text) for text in requirements]
    while open_ends:
        requirement = open_ends.pop()
        name, extras = canonical(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        names.add(name)
        for text in importlib.metadata.requires(name) or []:
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                open_ends.append(wanted)
    return names


@pytest.mark.parametrize("name", ["base.txt", "gateway.txt", "build.txt"])
def test_a_part_of_the_requirements_pins_what_serving_pins(name: str) -> None:
    assert pins(name).items() <= pins("serve.txt").items()


def test_images_without_torch_get_all_that_they_need_and_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = [*project["dependencies"], *project["optional-dependencies"]["tracing"]]
    assert set(pins("base.txt")) == needed(base)
    gateway = [*base, *project["optional-dependencies"]["gateway"]]
    assert set(pins("gateway.txt")) == needed(gateway)
    assert not {"torch", "transformers"} & set(pins("gateway.txt"))


def test_the_build_gets_all_that_it_needs() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needed(build) <= set(pins("build.txt"))


@pytest.mark.parametrize("service", SERVICES)
def test_it_is_built_in_stages_from_one_named_base(service: str) -> None:
    stages = images(service)
    names = [image.name for image in stages]
    assert names[0] == "build"
    for index, image in enumerate(stages):
        assert image.base == "${PYTHON_IMAGE}" or image.base in names[:index]
    declared = [i.rest for i in instructions(ROOT / "services" / service / "Dockerfile") if i.word == "ARG"]
    assert "PYTHON_IMAGE=python:3.11-slim" in declared


@pytest.mark.parametrize("service", SERVICES)
def test_it_installs_its_own_requirements(service: str) -> None:
    installed = {
        Path(word).name
        for instruction in images(service)[0].instructions
        if instruction.word == "RUN"
        for word in shlex.split(instruction.rest)
        if word.startswith("/src/requirements/")
    }
    assert installed == {"build.txt", REQUIREMENTS[service]}


@pytest.mark.parametrize("service", SERVICES)
def test_everything_it_copies_exists_and_is_let_in(service: str) -> None:
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for image in images(service):
        for instruction in image.instructions:
            if instruction.word == "COPY" and "--from" not in instruction.rest:
                *sources, _ = [word for word in instruction.rest.split() if not word.startswith("--")]
                for source in sources:
                    assert (ROOT / source).exists()
                    assert any(
                        rule == source or rule.startswith(f"{source}/") or Path(source).match(rule) for rule in let_in
                    )


@pytest.mark.parametrize("service", SERVICES)
def test_it_runs_the_service_as_nobody_in_particular(service: str) -> None:
    image = serving_image(service)
    assert image.last("USER").rest == "10001:10001"
    assert images(service)[-1].last("USER").rest == "10001:10001"
    assert image.last("ENTRYPOINT").argv() == ["python", "-m", f"fastserve_{service}"]
    assert importlib.util.find_spec(f"fastserve_{service}.__main__") is not None


@pytest.mark.parametrize("service", SERVICES)
def test_its_environment_is_that_of_the_supervisor_and_real_settings(service: str) -> None:
    environment = serving_image(service).environment()
    assert environment.items() >= SERVICE_ENVIRONMENT.items()
    settings = load(service, GIVEN[service], {k: v for k, v in environment.items() if k.startswith("FASTSERVE_")})
    assert settings.log_format == "json"


@pytest.mark.parametrize("service", SERVICES)
def test_its_health_is_asked_for_where_it_listens(service: str) -> None:
    image = serving_image(service)
    command = image.last("HEALTHCHECK").argv()
    assert command[:3] == ["python", "-m", "fastserve_common.healthcheck"]
    port = command[3].removeprefix("127.0.0.1:")
    environment = image.environment()
    listens = environment.get("FASTSERVE_LISTEN", f":{environment.get('FASTSERVE_GRPC_PORT')}").rpartition(":")[2]
    assert port == listens
    assert port in image.last("EXPOSE").rest.split()


@pytest.fixture
def fake_python(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python -m fastserve_worker.prepare MODEL` answers that the model is in $FOUND."""
    script = tmp_path / "bin/python"
    script.parent.mkdir()
    answer = '{\\"model_dir\\": \\"$FOUND\\", \\"root\\": \\"m\\"}'
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -m ]; then echo progress; echo "{answer}"; '
        f'else exec {shlex.quote(sys.executable)} "$@"; fi\n'
    )
    script.chmod(0o755)
    return {"PATH": f"{script.parent}:{os.environ['PATH']}"}


def prepare(environment: dict[str, str], link: Path, found: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(ROOT / "services/worker/prepare-model.sh"), "a-model", str(link)]
    return subprocess.run(command, env={**environment, "FOUND": str(found)}, capture_output=True, text=True)


def test_a_prepared_model_is_found_by_its_link_also_elsewhere(tmp_path: Path, fake_python: dict[str, str]) -> None:
    volume = tmp_path / "models"
    for name in ("first", "second"):
        (volume / "converted" / name).mkdir(parents=True)
        assert prepare(fake_python, volume / "served", volume / "converted" / name).returncode == 0
        assert (volume / "served").readlink() == Path("converted") / name
    moved = volume.rename(tmp_path / "mounted-elsewhere")
    assert (moved / "served").is_dir()
    assert sorted(path.name for path in moved.iterdir()) == ["converted", "served"]


def test_a_model_that_others_would_not_find_is_refused(tmp_path: Path, fake_python: dict[str, str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    result = prepare(fake_python, tmp_path / "models/served", tmp_path / "elsewhere")
    assert result.returncode == 2
    assert "put the model there" in result.stderr
    assert not (tmp_path / "models/served").exists()


@pytest.mark.parametrize("role", ["gateway", "scheduler", "kvstore"])
def test_the_documentation_counts_the_packages_of_an_image(role: str) -> None:
    row = re.search(rf"`services/{role}/Dockerfile` \| (\d+) packages", (ROOT / "docs/deploy.md").read_text())
    assert row
    assert int(row[1]) == len(pins(REQUIREMENTS[role]))
