"""What the repository holds, for the tests that look at all of it."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Written by the generator from protos/.
GENERATED = ROOT / "sdk/fastserve/v1"

PACKAGES = (
    "fastserve",
    "fastserve_common",
    "fastserve_gateway",
    "fastserve_kvstore",
    "fastserve_scheduler",
    "fastserve_worker",
)


def tracked_files() -> list[Path]:
    """Files under version control that exist in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def product_files() -> list[Path]:
    """Python of the product that people wrote."""
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("sdk", "services") and path.parent != GENERATED
    ]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
