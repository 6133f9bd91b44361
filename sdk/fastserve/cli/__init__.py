"""The `fastserve` command."""

from fastserve.cli.main import main

__all__ = ["main"]
