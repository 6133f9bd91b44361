"""Checkpoints and tokenizers in other formats, read by transformers and written as safetensors and tokenizer.json."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, modeling_gguf_pytorch_utils

from fastserve_worker.models.errors import PrepareError

log = logging.getLogger(__name__)

#: Where a tokenizer's files are missing, transformers may make one of nothing but special tokens; a real one is
#: smaller than its model's padded vocabulary, but not by this much.
MIN_VOCAB_SHARE = 0.1

#: Between two lines that say how far a conversion is.
PROGRESS_EVERY_S = 5.0

T = TypeVar("T")


def convert_gguf(file: Path, out: Path) -> None:
    """Weights in 32-bit floats, tokenizer and chat template of a GGUF file. Raises PrepareError."""
    _quiet()
    begin_s = time.monotonic()
    log.info("converting %s, once: reading the weights", file.name)
    try:
        with _lines_for_bars():
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        _forget_quantization(model)
        model.save_pretrained(out)
        log.info("converting %s: reading the tokenizer (%.0f s so far)", file.name, time.monotonic() - begin_s)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(out)
    except Exception as error:  # whatever its readers raise for a file they cannot make sense of
        raise PrepareError(f"cannot convert {file}: {error}") from error
    log.info("converted %s in %.0f s", file.name, time.monotonic() - begin_s)


def _forget_quantization(model: PreTrainedModel) -> None:
    """The weights are plain floats by now, but a model that came from GGUF refuses to be saved."""
    model.hf_quantizer = None  # type: ignore[assignment]  # nn.Module types attributes as tensors
    model.is_quantized = False  # type: ignore[assignment]  # as above
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def convert_weights(folder: Path, out: Path) -> None:
    """Safetensors of a checkpoint that has pickled weights only. Pickles are read as tensors, never as code."""
    _quiet()
    log.info("converting the weights of %s to safetensors, once", folder.name)
    try:
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).save_pretrained(out)
    except Exception as error:  # whatever its readers raise for a file they cannot make sense of
        raise PrepareError(f"cannot convert the weights in {folder}: {error}") from error


def convert_tokenizer(folder: Path, out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template of a tokenizer in any format transformers reads."""
    _quiet()
    log.info("converting the tokenizer of %s, once", folder.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.save_pretrained(out)
    except Exception as error:  # whatever its readers raise for a file they cannot make sense of
        raise PrepareError(f"cannot make a tokenizer.json from {folder}: {error}") from error
    vocab_size = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).vocab_size
    if len(tokenizer) < vocab_size * MIN_VOCAB_SHARE:
        raise PrepareError(f"{folder} has no tokenizer: {len(tokenizer)} tokens were found for a model of {vocab_size}")


@contextlib.contextmanager
def _lines_for_bars() -> Iterator[None]:
    """The reader of GGUF files draws a bar whatever it is told; a bar that redraws itself is noise in a log."""
    names = vars(modeling_gguf_pytorch_utils)
    bar = names["tqdm"]
    names["tqdm"] = _with_progress_lines
    try:
        yield
    finally:
        names["tqdm"] = bar


def _with_progress_lines(tensors: Sequence[T], desc: str = "") -> Iterator[T]:
    """Called as tqdm is called there."""
    said_s = time.monotonic()
    for index, tensor in enumerate(tensors):
        if time.monotonic() - said_s >= PROGRESS_EVERY_S:
            said_s = time.monotonic()
            log.info("%s %d of %d", desc or "reading", index, len(tensors))
        yield tensor


def _quiet() -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
