"""The sampler again, in plain 64-bit numpy with sorting: slow, short, and written from the description only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastserve_common.packed import unpack_u32
from fastserve_worker.sampling.params import DrawParams

Doubles = npt.NDArray[np.float64]


def adjusted_logits(logits: Sequence[float] | Doubles, params: DrawParams) -> Doubles:
    """After bias, suppression and penalties."""
    row = np.array(logits, dtype=np.float64)
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    for token_id in unpack_u32(params.suppressed):
        row[token_id] = -np.inf
    prompt, output = list(unpack_u32(params.penalty_prompt)), list(unpack_u32(params.penalty_output))
    for token_id in sorted({*prompt, *output}):
        if row[token_id] > 0:
            row[token_id] /= params.repetition_penalty
        else:
            row[token_id] *= params.repetition_penalty
    for token_id in sorted(set(output)):
        row[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    return row


def probabilities(logits: Sequence[float] | Doubles, params: DrawParams) -> Doubles:
    """[vocab]: what a draw has to follow; zero where a filter cuts."""
    row = adjusted_logits(logits, params)
    if params.temperature == 0:
        certain: Doubles = np.eye(len(row))[int(row.argmax())]
        return certain
    weights = np.exp((row - row.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[order[params.top_k :]] = 0
    cumulative = np.cumsum(weights[order]) / weights.sum()
    weights[order[1:][cumulative[:-1] >= params.top_p]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    result: Doubles = weights / weights.sum()
    return result


def edge_margin(logits: Sequence[float], params: DrawParams) -> float:
    """How far the cuts of top_p and min_p are from falling the other way: rounding decides below about 1e-6."""
    loose = probabilities(logits, params._replace(top_p=1.0, min_p=0.0))
    ordered = np.sort(loose)[::-1]
    margins = [np.abs(np.cumsum(ordered) - params.top_p).min() if params.top_p < 1 else 1.0]
    if params.min_p:
        margins.append(float(np.abs(ordered / ordered[0] - params.min_p).min()))
    return float(min(margins))
