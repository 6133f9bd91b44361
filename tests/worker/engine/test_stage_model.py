"""Loading: each stage reads its own tensors and nothing else; what cannot be served is refused by name."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fastserve_worker.engine import BatchRow, KvPool, PagedBatch, StageModel, UnsupportedModelError
from fastserve_worker.engine.checkpoint import Checkpoint
from fastserve_worker.engine.offline import OfflinePipeline
from fastserve_worker.engine.partition import split_layers

from .models import TinyModel, greedy_by_transformers

CPU = torch.device("cpu")


def _load(folder: Path, stage: int = 0, num_stages: int = 1, linear: str = "auto") -> StageModel:
    return StageModel.load(folder, stage=stage, num_stages=num_stages, dtype=torch.float32, device=CPU, linear=linear)


def _save(folder: Path, model_type: str, **settings: object) -> transformers.PreTrainedModel:
    config = AutoConfig.for_model(model_type, **settings)
    model: transformers.PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]  # untyped there
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["opt-projections", "llama-gqa", "llama-mqa-tied", "gpt2"])
def test_a_stage_reads_only_its_own_tensors(
    name: str, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints: list[Checkpoint] = []
    original = Checkpoint.__init__

    def remember(self: Checkpoint, model_dir: Path) -> None:
        original(self, model_dir)
        checkpoints.append(self)

    monkeypatch.setattr(Checkpoint, "__init__", remember)
    folder = tiny_model(name).folder
    stored = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
    stages = [_load(folder, stage, 3) for stage in range(3)]
    read = [checkpoint.tensors_read for checkpoint in checkpoints]
    for stage, tensors in zip(stages, read, strict=True):
        layers = {int(part) for tensor in tensors for part in tensor.split(".") if part.isdigit()}
        assert layers == set(range(stage.config.first_layer, stage.config.last_layer + 1))
    shared = (read[0] & read[1]) | (read[1] & read[2]) | (read[0] & read[2])
    assert all("embed_tokens" in tensor or "wte" in tensor for tensor in shared)  # a tied head is the embedding
    assert set.union(*read) == stored


def test_stages_agree_on_the_model(tiny_model: Callable[[str], TinyModel]) -> None:
    folder = tiny_model("llama-gqa").folder
    stages = [_load(folder, stage, 2) for stage in range(2)]
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, True)]
    assert stages[0].config.fingerprint == stages[1].config.fingerprint
    assert stages[0].config.num_stage_layers + stages[1].config.num_stage_layers == stages[0].config.num_layers == 4
    assert stages[0].config.last_layer + 1 == stages[1].config.first_layer
    assert (stages[0].config.num_kv_heads, stages[0].config.head_dim, stages[0].config.vocab_size) == (2, 16, 307)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs procfs")
@pytest.mark.parametrize("linear", ["auto", "torch"])
@pytest.mark.parametrize("name", ["llama-mqa-tied", "opt"])
def test_a_loaded_stage_does_not_depend_on_its_files(
    name: str, linear: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    """A mapped weight would be read from disk again, mid-iteration, after the system has dropped its pages."""
    folder = tiny_model(name).folder
    stage = _load(folder, linear=linear)
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert stage.is_first


def test_fingerprint_tells_configurations_apart(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    folder = tiny_model("llama-gqa").folder
    copied = shutil.copytree(folder, tmp_path / "copy")
    assert Checkpoint(copied).fingerprint() == Checkpoint(folder).fingerprint()
    (copied / "config.json").write_text((copied / "config.json").read_text().replace("128", "64"))
    assert Checkpoint(copied).fingerprint() != Checkpoint(folder).fingerprint()


def test_the_last_stage_gives_logits_of_sampled_rows_only(tiny_model: Callable[[str], TinyModel]) -> None:
    stage = _load(tiny_model("llama-gqa").folder)
    pool = KvPool.for_model(stage.config, num_blocks=4, device=CPU)
    ids = torch.tensor([5, 6, 7, 8])
    rows = [BatchRow(0, 2, [0], False), BatchRow(0, 1, [1], True), BatchRow(0, 1, [2], False)]
    logits = stage.forward(ids, PagedBatch(rows, pool))
    assert (logits.shape, logits.dtype) == ((1, 307), torch.float32)
    chunk_only = stage.forward(ids[:2], PagedBatch([BatchRow(0, 2, [3], False)], pool))
    assert chunk_only.shape == (0, 307)


def test_refuses_inputs_that_are_not_the_batch(tiny_model: Callable[[str], TinyModel]) -> None:
    stage = _load(tiny_model("llama-gqa").folder)
    pool = KvPool.for_model(stage.config, num_blocks=4, device=CPU)
    with pytest.raises(ValueError, match="the batch has 2 tokens, the inputs 3"):
        stage.forward(torch.tensor([1, 2, 3]), PagedBatch([BatchRow(0, 2, [0], True)], pool))


def test_refuses_cuts_that_do_not_exist(tiny_model: Callable[[str], TinyModel]) -> None:
    folder = tiny_model("llama-gqa").folder
    with pytest.raises(UnsupportedModelError, match="cannot cut 4 layers into 5 stages"):
        _load(folder, 0, 5)
    with pytest.raises(ValueError, match="stage 2 is not one of 2"):
        _load(folder, 2, 2)
    with pytest.raises(ValueError, match="linear layers are one of"):
        _load(folder, linear="int3")


def test_refuses_folders_without_what_it_needs(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no config\.json"):
        _load(tmp_path)
    shutil.copy(tiny_model("llama-gqa").folder / "config.json", tmp_path)
    with pytest.raises(UnsupportedModelError, match="no safetensors weights"):
        _load(tmp_path)


def test_refuses_an_encoder_decoder(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        _load(tmp_path)


def test_refuses_attention_outside_the_interface(tmp_path: Path) -> None:
    _save(tmp_path, "bloom", vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModelError, match="does not take its attention"):
        _load(tmp_path)


def test_refuses_layers_without_paged_kv(tmp_path: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    copied = shutil.copytree(tiny_model("qwen3").folder, tmp_path / "copy")
    config = json.loads((copied / "config.json").read_text())
    config["layer_types"] = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="without paged KV: linear_attention"):
        _load(copied)


def test_refuses_an_unknown_model_type(tmp_path: Path, tiny_model: Callable[[str], TinyModel]) -> None:
    copied = shutil.copytree(tiny_model("llama-gqa").folder, tmp_path / "copy")
    text = (copied / "config.json").read_text().replace('"llama"', '"never-heard-of"')
    (copied / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match="cannot be used"):
        _load(copied)


def test_names_a_missing_tensor(tmp_path: Path) -> None:
    _save(tmp_path, "llama", vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
          num_attention_heads=2)  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        _load(tmp_path)


def test_a_model_that_scales_its_embeddings_in_forward_runs_whole_but_not_cut(tmp_path: Path) -> None:
    """Its residual scaling also makes it unlike Llama: its layers must have kept their torch form."""
    model = _save(tmp_path, "granite", vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=2, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
                  eos_token_id=None)  # fmt: skip
    prompt = [5, 6, 7, 8, 9]
    expected = greedy_by_transformers(model, prompt)
    assert OfflinePipeline.load(tmp_path, num_blocks=8).generate([prompt], [len(expected)]) == [expected]
    with pytest.raises(UnsupportedModelError, match="only run as one stage"):
        _load(tmp_path, 1, 2)


def test_cuts_balance_the_weights_streamed_per_iteration() -> None:
    assert split_layers([1] * 10, 2, head_cost=0) == [range(0, 5), range(5, 10)]
    assert split_layers([1] * 10, 2, head_cost=4) == [range(0, 7), range(7, 10)]
    assert split_layers([1] * 3, 3, head_cost=100) == [range(0, 1), range(1, 2), range(2, 3)]
    assert split_layers([5, 1, 1, 1], 2, head_cost=0) == [range(0, 1), range(1, 4)]
