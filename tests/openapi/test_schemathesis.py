"""The OpenAPI document is true: a stranger's tool writes requests from it and holds the answers against it."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.gateway.fake_scheduler import Script
from tests.gateway.models import END, ids_of
from tests.gateway.rig import rig

#: Checks that cannot hold here, and why.
EXCLUDED = {
    # Rules between fields (min_tokens up to max_tokens, prompts times n, ...) cannot be said in a JSON schema.
    "positive_data_acceptance",
}

KEY = "a-key"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.full)])
async def test_every_answer_is_a_documented_one(tmp_path: Path, examples: int) -> None:
    script = Script(ids=[*ids_of("hi \u4f60"), END])
    async with rig(tmp_path, script, api_key=(KEY,)) as r:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{r.base_url}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}", "--exclude-checks", ",".join(sorted(EXCLUDED))),
            *("--max-examples", str(examples), "--seed", "1", "--generation-database", "none"),
            *("--max-failures", "5", "--warnings", "off", "--no-color"),
        ]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        assert len(r.fake.jobs) > 2 * examples, "most requests are ones that are served"
        await r.quiet()
