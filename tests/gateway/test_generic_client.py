"""A gRPC client that nobody here wrote, and that knows of the API only what reflection says: `buf curl`."""

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .fake_scheduler import Script
from .models import END, VOCAB_SIZE, ids_of
from .rig import Rig, rig

SERVICE = "fastserve.v1.Inference"


class Buf:
    def __init__(self, r: Rig, skip_or_fail: Callable[[str], None]) -> None:
        beside = Path(sys.executable).with_name("buf")
        binary = shutil.which("buf") or (str(beside) if beside.exists() else None)
        if binary is None:
            skip_or_fail("buf is not installed")
        self._command = [str(binary), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
        self._url = f"http://127.0.0.1:{r.gateway.grpc_port}"

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *self._command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        stdout, stderr = await process.communicate()
        return process.returncode or 0, stdout.decode(), stderr.decode()

    async def names(self, what: str) -> set[str]:
        status, stdout, stderr = await self.run(what, self._url)
        assert status == 0, stderr
        return set(stdout.split())

    async def call(self, method: str, request: dict[str, object] | None = None) -> list[dict[str, Any]]:
        """What was answered, message by message."""
        status, stdout, stderr = await self.try_call(method, request)
        assert status == 0, stderr
        decoder, messages, rest = json.JSONDecoder(), [], stdout.strip()
        while rest:
            message, end = decoder.raw_decode(rest)
            messages.append(message)
            rest = rest[end:].lstrip()
        return messages

    async def try_call(self, method: str, request: dict[str, object] | None = None) -> tuple[int, str, str]:
        return await self.run("--data", json.dumps(request or {}), f"{self._url}/{SERVICE}/{method}")


async def test_everything_can_be_found_and_called_by_reflection(
    tmp_path: Path, skip_or_fail: Callable[[str], None]
) -> None:
    async with rig(tmp_path, Script(ids=[*ids_of("hi \u4f60"), END])) as r:
        buf = Buf(r, skip_or_fail)
        assert await buf.names("--list-services") >= {SERVICE, "grpc.health.v1.Health"}
        methods = {name.removeprefix(f"{SERVICE}/") for name in await buf.names("--list-methods") if SERVICE in name}
        assert methods == {"Generate", "GenerateStream", "Abort", "GetModelInfo", "Tokenize", "Detokenize"}
        (info,) = await buf.call("GetModelInfo")
        assert (info["model"], info["maxModelLen"], info["vocabSize"]) == ("tiny", 1000, VOCAB_SIZE)
        request: dict[str, object] = {"text": "x", "stopping": {"maxNewTokens": 20}, "requestId": "mine"}
        (whole,) = await buf.call("Generate", request)
        (output,) = whole["outputs"]
        assert output["text"] == "hi \u4f60"
        assert output["finishInfo"] == {"reason": "FINISH_REASON_STOP", "stopTokenId": END}
        assert whole["usage"] == {"promptTokens": 1, "completionTokens": 7}
        pieces = await buf.call("GenerateStream", request)
        assert "".join(output.get("text", "") for piece in pieces for output in piece["outputs"]) == output["text"]
        assert await buf.call("Tokenize", {"text": "hi"}) == [{"tokenIds": ids_of("hi")}]
        assert await buf.call("Detokenize", {"tokenIds": ids_of("hi")}) == [{"text": "hi"}]
        assert await buf.call("Abort", {"requestId": "nobody"}) == [{}]
        status, _, problem = await buf.try_call("Generate", {"text": "x", "temperature": -1})
        assert status != 0
        error = json.loads(problem)
        assert (error["code"], error["message"]) == ("invalid_argument", "temperature must be between 0 and 100")
        await r.quiet()
