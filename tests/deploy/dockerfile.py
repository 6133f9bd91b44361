"""Dockerfiles as instructions: enough of the format to check what ours say."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "kvstore", "scheduler", "worker")


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    rest: str

    def argv(self) -> list[str]:
        """Of a form in brackets."""
        return list(json.loads(self.rest[self.rest.index("[") :]))


@dataclass(frozen=True, slots=True)
class Image:
    """One stage: what it is made from, what it is called, and its instructions."""

    base: str
    name: str
    instructions: tuple[Instruction, ...]

    def last(self, word: str) -> Instruction:
        return [i for i in self.instructions if i.word == word][-1]

    def environment(self) -> dict[str, str]:
        pairs = [pair for i in self.instructions if i.word == "ENV" for pair in shlex.split(i.rest)]
        return dict(pair.split("=", 1) for pair in pairs)


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines()]


def images(service: str) -> list[Image]:
    """The stages of a service's Dockerfile, in order."""
    found: list[tuple[str, str, list[Instruction]]] = []
    for instruction in instructions(ROOT / "services" / service / "Dockerfile"):
        if instruction.word == "FROM":
            base, _, name = instruction.rest.partition(" AS ")
            found.append((base, name, []))
        elif found:
            found[-1][2].append(instruction)
    return [Image(base, name, tuple(rest)) for base, name, rest in found]


def serving_image(service: str) -> Image:
    """The one that runs the service."""
    (image,) = [i for i in images(service) if any(x.rest.endswith(f'"fastserve_{service}"]') for x in i.instructions)]
    return image
