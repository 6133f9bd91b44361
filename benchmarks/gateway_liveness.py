"""How long `/health/live` takes while the gateway is busy: a prompt of 20 MB, then 1,000 requests at once.

The gateway is a process of its own in front of a scripted scheduler; the probe, one every 10 ms, is another, so that
neither waits for whoever makes the load.

    PYTHONPATH=. python benchmarks/gateway_liveness.py
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
from tests.gateway.fake_scheduler import FakeScheduler, Script
from tests.gateway.models import write_model

from fastserve_common.load.stats import percentile
from fastserve_common.state import open_state

BURST = 1000
PROMPT_BYTES = 20 * 1024 * 1024
PROBE = """
import json, signal, sys, time, http.client
times, going = [], True
def stop(*_):
    global going
    going = False
signal.signal(signal.SIGTERM, stop)
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
print("up", flush=True)
while going:
    began = time.perf_counter()
    connection.request("GET", "/health/live")
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    times.append(time.perf_counter() - began)
    time.sleep(0.01)
print(json.dumps(times))
"""


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[int]:
    """Its HTTP port."""
    fake = FakeScheduler(lambda _: Script(ids=list(b"hello world")))
    url = f"sqlite://{folder}/state.db"
    store = open_state(url)
    await fake.start(store)
    flags = [f"--state={url}", f"--model-dir={write_model(folder / 'model')}", "--served-model-name=tiny"]
    flags += ["--port=0", "--grpc-port=-1", "--drain-timeout=0", "--log-level=error"]
    flags += ["--max-body-bytes=67108864", "--max-prompt-bytes=67108864"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "fastserve_gateway", *flags)
    try:
        while not (members := await store.members("gateway")):  # noqa: ASYNC110 - another process says when
            await asyncio.sleep(0.05)
        (info,) = members.values()
        yield int(info["http"].rpartition(":")[2])
    finally:
        process.terminate()
        await process.wait()
        await fake.stop()
        await store.close()


async def probed(port: int, load: Callable[[], Coroutine[Any, Any, object]]) -> list[float]:
    """Seconds that each probe took while `load` ran."""
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROBE, str(port), stdout=asyncio.subprocess.PIPE, limit=PROMPT_BYTES
    )
    assert probe.stdout is not None
    await probe.stdout.readline()
    await load()
    probe.terminate()
    said, _ = await probe.communicate()
    times: list[float] = json.loads(said)
    return times


def report(what: str, times: list[float]) -> None:
    shown = {f"p{share}": round(percentile(sorted(times), share) * 1000, 1) for share in (50, 99)}
    line = {"load": what, "probes": len(times), **shown, "max": round(max(times) * 1000, 1), "unit": "ms"}
    sys.stdout.write(f"{json.dumps(line)}\n")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with gateway(Path(folder)) as port:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits) as http:
                while (await http.get("/health/ready")).status_code != 200:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)

                async def prompt() -> None:
                    body = {"model": "tiny", "prompt": "hello world " * (PROMPT_BYTES // 12), "max_tokens": 1}
                    assert (await http.post("/v1/completions", json=body)).status_code == 400

                async def burst() -> None:
                    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
                    asked = (http.post("/v1/completions", json=body) for _ in range(BURST))
                    answers = await asyncio.gather(*asked, return_exceptions=True)
                    good = sum(isinstance(answer, httpx.Response) and answer.is_success for answer in answers)
                    sys.stdout.write(f"{json.dumps({'answered': good, 'of': BURST})}\n")

                report("none", await probed(port, lambda: asyncio.sleep(2)))
                report("a prompt of 20 MB", await probed(port, prompt))
                report(f"{BURST} requests at once", await probed(port, burst))


if __name__ == "__main__":
    asyncio.run(main())
