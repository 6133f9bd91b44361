import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import free_port

from .redis_process import RedisProcess


@pytest.fixture
def own_redis(tmp_path: Path, skip_or_fail: Callable[[str], None]) -> Iterator[RedisProcess]:
    """A Redis for this test alone, to do harm to."""
    binary = shutil.which("redis-server")
    if binary is None:
        skip_or_fail("redis-server is not installed")
        return
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisProcess(binary, folder, free_port()) as process:
        yield process
