"""The client is light: a program that imports it gets gRPC and nothing of the servers."""

import subprocess
import sys

HEAVY = ("pydantic", "rich", "httptools", "uvloop", "redis", "prometheus_client", "numpy", "torch", "fastserve_common")


def test_importing_the_client_imports_nothing_heavy() -> None:
    program = f"import sys, fastserve; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_everything_exported_is_there() -> None:
    import fastserve

    assert sorted(fastserve.__all__) == fastserve.__all__
    assert all(hasattr(fastserve, name) for name in fastserve.__all__)
