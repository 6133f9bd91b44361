"""Getting the model onto this machine's disk in the form the stages load, by the worker's own tool."""

import asyncio
import json
import os
from pathlib import Path

from fastserve.cli.reporter import Phase
from fastserve.cli.settings import EngineSettings
from fastserve.cli.specs import Model, child_environment, module_argv
from fastserve_common.settings import SettingsError

_LAST_LINES = 8


async def prepare(settings: EngineSettings, phase: Phase, stop: asyncio.Event) -> Model | None:
    """None when told to stop meanwhile. Raises SettingsError with the tool's own words."""
    if (model := _as_it_is(settings)) is not None:
        return model
    process = await asyncio.create_subprocess_exec(
        *module_argv("fastserve_worker.prepare", settings.model),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment({}, os.environ),
        start_new_session=True,
    )
    working = asyncio.create_task(_follow(process, phase))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return None
        stdout, said = working.result()
    finally:
        stopped.cancel()
        if process.returncode is None:
            process.kill()
        await asyncio.gather(working, stopped, return_exceptions=True)
    if process.returncode != 0:
        raise SettingsError("\n".join(said[-_LAST_LINES:]) or f"model: cannot prepare {settings.model}")
    result = json.loads(stdout.splitlines()[-1])
    return _model(Path(result["model_dir"]), result["root"])


def _as_it_is(settings: EngineSettings) -> Model | None:
    """Fake stages load nothing, and a gateway needs no more than a folder with a tokenizer."""
    folder = Path(settings.model).expanduser().absolute()
    return _model(folder, settings.model) if settings.fake and folder.is_dir() else None


def _model(folder: Path, root: str) -> Model:
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    vocab_size = config.get("text_config", config).get("vocab_size", config.get("vocab_size"))
    return Model(folder, root, vocab_size if isinstance(vocab_size, int) else None)


async def _follow(process: asyncio.subprocess.Process, phase: Phase) -> tuple[str, list[str]]:
    """Standard output whole, and the lines of standard error, each shown as it comes."""
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.create_task(process.stdout.read())
    said: list[str] = []
    async for line in process.stderr:
        said.append(line.decode(errors="replace").rstrip())
        phase.detail(said[-1])
    stdout = (await reading).decode()
    await process.wait()
    return stdout, said
