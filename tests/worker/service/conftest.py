"""One tiny random model for the whole suite, with plain transformers' own answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 307
MAX_MODEL_LEN = 256
NUM_OUTPUT = 12
_PROMPT_LENGTHS = (5, 16, 33, 1)


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """A saved model, prompts, the greedy answers of plain transformers, and their log-probabilities."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    logprobs: list[list[float]]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyLlama]:
    verbosity, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    torch.set_num_threads(1)
    yield _make(tmp_path_factory.mktemp("tiny-llama"))
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


def _make(folder: Path) -> TinyLlama:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=None,
        initializer_range=0.4,  # small weights repeat one token for ever, and such a test cannot fail
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in _PROMPT_LENGTHS]
    answers, logprobs = zip(*(_greedy(model, prompt) for prompt in prompts), strict=True)
    return TinyLlama(folder, prompts, list(answers), list(logprobs))


@torch.inference_mode()
def _greedy(model: LlamaForCausalLM, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The oracle: one prompt alone, the whole sequence anew for every token, no cache at all."""
    ids, logprobs = list(prompt), []
    for _ in range(NUM_OUTPUT):
        row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(prompt) :], logprobs
