import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .system import System

#: What fake stages draw from; every id is a word of the tokenizer below.
FAKE_VOCAB_SIZE = 1024

Start = Callable[..., System]


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and no weights: one word per id."""
    folder = tmp_path_factory.mktemp("words")
    vocab = {f"w{i}": i for i in range(FAKE_VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "config.json").write_text(json.dumps({"vocab_size": FAKE_VOCAB_SIZE, "eos_token_id": 0}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured once, then known."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="session")
def fake_args(words: Path, profiles: Path) -> list[str]:
    return [
        str(words),
        "--fake",
        "--port=0",
        "--host-kv-memory=8MiB",
        "--kv-memory=64MiB",
        f"--profile-dir={profiles}",
        "--served-model-name=words",
    ]


@pytest.fixture
def start(tmp_path: Path, fake_args: list[str]) -> Iterator[Start]:
    """Start a system of fake stages, with more arguments."""
    systems: list[System] = []

    def run(*args: str) -> System:
        system = System(tmp_path / f"system-{len(systems)}", *fake_args, *args)
        systems.append(system)
        return system

    yield run
    for system in systems:
        system.destroy()
