"""`python -m fastserve_worker.prepare MODEL`: makes a model ready to serve and tells where it is.

The last line of standard output is `{"model_dir": ..., "root": ...}`; progress goes to standard error.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import Field

from fastserve_common.logs import setup_logs
from fastserve_common.settings import Settings, SettingsError
from fastserve_worker.models.cache import build_once, default_cache_dir, folder_name
from fastserve_worker.models.complete import complete_folder, fill_in
from fastserve_worker.models.errors import PrepareError
from fastserve_worker.models.packaged import DEMO_MODEL, demo_model_file

EXIT_REFUSED = 2


class PrepareSettings(Settings):
    """Make a model ready to serve: fetch it, convert it where needed, and print where it is."""

    model: str = Field(description=f"a hub id (owner/name), a folder, a .gguf file, or {DEMO_MODEL}")
    cache_dir: Path | None = Field(
        None, description="where converted models are kept (default: ~/.cache/fastserve/models)"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a model on the hub")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """`model_dir`: config.json, safetensors, tokenizer.json, tokenizer_config.json, generation_config.json, and a
    chat template where the model has one. `root`: what the user called it."""

    model_dir: str
    root: str


def prepare(model: str, cache_dir: Path | None = None, revision: str | None = None) -> PreparedModel:
    """Raises PrepareError with a sentence for the user."""
    cache_dir = cache_dir or default_cache_dir()
    path = Path(model).expanduser()
    if model.lower() == DEMO_MODEL:
        folder = _converted(demo_model_file(), DEMO_MODEL, cache_dir)
    elif path.is_file():
        folder = _from_file(path, cache_dir)
    elif path.is_dir():
        folder = _from_folder(path, cache_dir)
    elif model.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise PrepareError(f"{model} does not exist")
    else:
        from fastserve_worker.models.hub import download

        folder = complete_folder(download(model, revision), cache_dir)
    return PreparedModel(str(folder.absolute()), model)


def _from_file(path: Path, cache_dir: Path) -> Path:
    if path.suffix != ".gguf":
        raise PrepareError(f"{path} is not a .gguf file; other checkpoints are given as folders")
    return _converted(path, path.stem, cache_dir)


def _from_folder(folder: Path, cache_dir: Path) -> Path:
    """A folder may also hold nothing but one GGUF file."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1 and not (folder / "config.json").is_file():
        return _from_file(files[0], cache_dir)
    return complete_folder(folder, cache_dir)


def _converted(file: Path, name: str, cache_dir: Path) -> Path:
    def build(out: Path) -> None:
        from fastserve_worker.models.convert import convert_gguf

        convert_gguf(file.resolve(), out)
        fill_in(out)

    return build_once(cache_dir, folder_name(name, [file]), build)


def main() -> int:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars that redraw themselves are noise in a log
    try:
        settings = PrepareSettings.load(sys.argv[1:], prog="fastserve-prepare", positional="model")
        setup_logs("prepare", level=settings.log_level, log_format=settings.log_format)
        prepared = prepare(settings.model, settings.cache_dir, settings.revision)
    except (SettingsError, PrepareError) as error:
        sys.stderr.write(f"fastserve-prepare: {error}\n")
        return EXIT_REFUSED
    sys.stdout.write(json.dumps(asdict(prepared)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
