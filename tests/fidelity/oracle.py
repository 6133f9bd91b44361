"""What the answers must be: plain transformers without a cache, the sampler in 64-bit numpy, `tokenizers` for text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tests.gateway.models import END, PAD
from tests.worker.sampling.reference import adjusted_logits, probabilities
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from fastserve.types import GenerateOptions
from fastserve_common.packed import pack_u32
from fastserve_worker.sampling.params import DrawParams
from fastserve_worker.sampling.uniform import uniform

from .case import Case, Logprobs, Result, Seen

EOS = frozenset({END, PAD})

#: A draw this close to falling the other way would test the last bit of a float, not the system.
MIN_MARGIN = 2e-5


class Oracle:
    """One request alone."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train(False)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._rows: dict[tuple[int, ...], npt.NDArray[np.float64]] = {}

    def result(self, case: Case) -> Result:
        prompt = self.tokenizer.encode(case.prompt).ids
        answers = [self._answer(prompt, case.options, index) for index in range(case.options.get("n", 1))]
        return Result(answers, len(prompt), sum(len(answer.token_ids or ()) for answer in answers))

    def settled(self, case: Case) -> Case:
        """The same with the next seed that leaves no draw to rounding."""
        first = case.options.get("seed", 0)
        for seed in range(first, first + 100):
            candidate = case.with_(seed=seed)
            if self._margin(candidate) > MIN_MARGIN:
                return candidate
        raise AssertionError(f"{case.name}: every seed is decided by rounding")

    def _margin(self, case: Case) -> float:
        prompt = self.tokenizer.encode(case.prompt).ids
        margin = 1.0
        for index in range(case.options.get("n", 1)):
            ids: list[int] = []
            for token_id in self._answer(prompt, case.options, index).token_ids or ():
                margin = min(margin, self._margin_of(prompt, ids, case.options, index))
                ids.append(token_id)
        return margin

    def _margin_of(self, prompt: list[int], output: list[int], options: GenerateOptions, index: int) -> float:
        row, params = self._row([*prompt, *output]), _params(prompt, output, options, index)
        if params.temperature == 0:
            first, second = np.sort(adjusted_logits(row, params))[[-1, -2]]
            return float(first - second)
        cumulative = np.cumsum(probabilities(row, params))
        edges = float(np.abs(cumulative - uniform(params.seed, len(output))).min())
        loose = np.sort(probabilities(row, _params(prompt, output, {**options, "top_p": 1.0, "min_p": 0.0}, index)))
        cut = min(abs(float(np.cumsum(loose[::-1])[k]) - params.top_p) for k in range(len(loose)))
        ratio = float(np.abs(loose / loose[-1] - params.min_p).min()) if params.min_p else 1.0
        return min(edges, cut if params.top_p < 1 else 1.0, ratio)

    def _answer(self, prompt: list[int], options: GenerateOptions, index: int) -> Seen:
        output: list[int] = []
        logprobs: Logprobs = []
        stops = frozenset(options.get("stop_token_ids", ())) | (frozenset() if options.get("ignore_eos") else EOS)
        seen = Seen("", "length", None, output, logprobs if "logprobs" in options else None)
        while len(output) < options["max_tokens"]:
            row = self._row([*prompt, *output])
            token_id = _draw(row, _params(prompt, output, options, index))
            output.append(token_id)
            logprobs.append(_logprobs(row, token_id, options.get("logprobs", 0)))
            may_stop = len(output) > options.get("min_tokens", 0)
            if may_stop and token_id in stops:
                seen.finish, seen.stop = "stop", None if token_id in EOS else token_id
                seen.text = self._text(output if options.get("include_stop") else output[:-1])
                return seen
            if may_stop and (stopped := self._stopped(output, options)) is not None:
                seen.text, seen.stop = stopped
                seen.finish = "stop"
                return seen
        seen.text = self._text(output)
        return seen

    def _stopped(self, output: list[int], options: GenerateOptions) -> tuple[str, str] | None:
        """(text, stop string) when the last token completes a stop string: the first that is complete, the longest."""
        stop = options.get("stop", ())
        before, text = self._text(output[:-1]), self._text(output)
        for end in range(len(before.rstrip("\ufffd")) + 1, len(text) + 1):
            ending = [s for s in ([stop] if isinstance(stop, str) else stop) if text[:end].endswith(s)]
            if ending:
                found = max(ending, key=len)
                return text[: end if options.get("include_stop") else end - len(found)], found
        return None

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @torch.inference_mode()
    def _row(self, ids: list[int]) -> npt.NDArray[np.float64]:
        key = tuple(ids)
        if key not in self._rows:
            self._rows[key] = self._model(torch.tensor([ids])).logits[0, -1].double().numpy()
        return self._rows[key]


def _params(prompt: list[int], output: list[int], options: GenerateOptions, index: int) -> DrawParams:
    suppressed: list[int] = []
    if len(output) < options.get("min_tokens", 0):
        suppressed = sorted({*options.get("stop_token_ids", ()), *(() if options.get("ignore_eos") else EOS)})
    return DrawParams(
        output_position=len(output),
        temperature=options.get("temperature", 1.0),
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
        min_p=options.get("min_p", 0.0),
        seed=options.get("seed", 0) + index,
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        logit_bias=options.get("logit_bias", {}),
        suppressed=pack_u32(suppressed),
        penalty_prompt=pack_u32(prompt),
        penalty_output=pack_u32(output),
    )


def _draw(row: npt.NDArray[np.float64], params: DrawParams) -> int:
    weights = probabilities(row, params)
    if params.temperature == 0:
        return int(weights.argmax())
    cumulative = np.cumsum(weights)
    point = uniform(params.seed, params.output_position) * cumulative[-1]
    return int(np.searchsorted(cumulative, point, side="right"))


def _logprobs(row: npt.NDArray[np.float64], token_id: int, num_top: int) -> tuple[float, list[float]]:
    """Of the untouched logits."""
    logprobs = row - row.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    return float(logprobs[token_id]), [float(value) for value in np.sort(logprobs)[::-1][:num_top]]
