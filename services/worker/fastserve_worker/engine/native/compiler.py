"""Compiles the kernels once per source, flags and compiler, into a cache that processes share."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE_DIR = Path(__file__).parent / "src"
CACHE_VARIABLE = "FASTSERVE_KERNEL_CACHE"
COMPILE_TIMEOUT_S = 120
#: What the sources are written for; x86-64-v3 has all of it. Not -march=native: a cache may be filled at image build.
_FLAGS = ("-O3", "-std=c++17", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno")
#: Sums must round the same whatever the optimiser merges.
_EXACT_FLAGS = ("-ffp-contract=off",)
_CAPABLE = ("AVX2", "AVX512")


class KernelsUnavailableError(RuntimeError):
    """This machine cannot run or build the kernels; the message says why."""


def build() -> Path:
    """The shared library, compiled now unless the cache has it. Raises KernelsUnavailableError.

    Safe to call from several processes: each compiles into a file of its own and renames it into place.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _CAPABLE:
        raise KernelsUnavailableError(f"the CPU offers {capability}, the kernels need AVX2 and FMA")
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise KernelsUnavailableError("no C++ compiler (g++) is installed")
    library = _cache_dir() / f"kernels-{_fingerprint(compiler)}.so"
    if not library.exists():
        _compile(compiler, library)
    return library


def _cache_dir() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastserve" / "kernels"


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256("\0".join((*_FLAGS, *_EXACT_FLAGS)).encode())
    digest.update(_run([compiler, "--version"]).encode())
    for source in sorted(SOURCE_DIR.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            built = Path(scratch) / library.name
            sources = [str(source) for source in sorted(SOURCE_DIR.glob("*.cpp"))]
            _run([compiler, *_FLAGS, *_EXACT_FLAGS, "-o", str(built), *sources])
            built.replace(library)
    except OSError as error:
        raise KernelsUnavailableError(f"the kernel cache cannot be written: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{command[0]} could not run: {error}") from error
    if done.returncode != 0:
        raise KernelsUnavailableError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
