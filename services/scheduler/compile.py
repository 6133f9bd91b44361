"""Builds a copy of the scheduler whose core, and the simulator around it, are compiled to C by mypyc.

    python services/scheduler/compile.py build/compiled
    PYTHONPATH=build/compiled fastserve simulate --policy predicted

A copy and never in place: a library left beside a source file hides every later change of it.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "fastserve_scheduler"
COMPILED = ("core", "core/kv", "core/policies", "sim")
"""Folders of the package; the rest waits for others and gains nothing."""


class BuildError(Exception):
    """A sentence for who asked for it."""


def modules(package: Path) -> list[str]:
    """What is compiled, relative to the folder of the package."""
    found = [file for folder in COMPILED for file in sorted((package / folder).glob("*.py"))]
    return [str(file.relative_to(package.parent)) for file in found if file.name != "__init__.py"]


def build(out: Path, optimise: int = 3) -> Path:
    """Returns the compiled package. `optimise`: as of gcc's -O. Raises BuildError."""
    if not (shutil.which("gcc") or shutil.which("cc")):
        raise BuildError("no C compiler: install gcc")
    package = out / SOURCE.name
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "MYPYC_OPT_LEVEL": str(optimise), "MYPYC_DEBUG_LEVEL": "0"}
    environment.pop("MYPYPATH", None)
    command = [sys.executable, "-m", "mypyc", "--strict", *modules(package)]
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"mypyc failed:\n{(done.stdout + done.stderr)[-4000:]}")
    shutil.rmtree(out / "build")
    return package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder that is emptied and gets the package")
    parser.add_argument("--optimise", type=int, default=3, choices=range(4), help="0 compiles sooner and runs slower")
    options = parser.parse_args()
    try:
        build(options.out, options.optimise)
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
