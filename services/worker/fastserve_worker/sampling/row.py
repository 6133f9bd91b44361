"""Draws one token from one row of logits, on the host.

The order of what acts on a row, that of vLLM's sampler up to the temperature and that of transformers behind it:

1. `logit_bias` is added, `suppressed` ids become impossible
2. repetition penalty over prompt and output: positive logits are divided by it, others multiplied
3. frequency penalty times the count in the output, then presence penalty once for each id in the output
4. temperature; zero means: the most likely token, the lowest id among equals
5. `top_k`, `top_p` (of what top_k left), `min_p` (times the probability of the most likely token)
6. one uniform number, looked up in the cumulative distribution of what is left, ids rising

Nothing but the row and its parameters goes in, so no batch mate can change what comes out. Nothing is sorted: the
edges of top_k and top_p are selected, which costs a few passes over the vocabulary.
"""

import numpy as np
import numpy.typing as npt

from fastserve_worker.sampling.params import DrawParams
from fastserve_worker.sampling.uniform import uniform

#: Below this the draw is greedy but for ties; its reciprocal is still a 32-bit float.
MIN_TEMPERATURE = 1e-30

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def draw_from_row(logits: Floats, params: DrawParams) -> int:
    """A token id. `logits`, [vocab], is not changed. Raises ValueError when no token is left that could be drawn."""
    if params.changes_logits:
        logits = logits.copy()
        change_logits(logits, params)
    if not params.temperature > 0:
        return int(logits.argmax())
    ids, weights = _filter(logits, params)
    cumulative = weights.cumsum(dtype=np.float64)
    point = uniform(params.seed, params.output_position) * cumulative[-1]
    index = min(int(cumulative.searchsorted(point, side="right")), len(cumulative) - 1)
    return index if ids is None else int(ids[index])


def change_logits(logits: Floats, params: DrawParams) -> None:
    """Steps 1 to 3, in place. Ids that the vocabulary does not have are passed over: they have no logit to change."""
    vocab_size = len(logits)
    for token_id, bias in params.logit_bias.items():
        if token_id < vocab_size:
            logits[token_id] += bias
    suppressed = _ids(params.suppressed)
    logits[suppressed[suppressed < vocab_size]] = -np.inf
    if params.repetition_penalty != 1:
        seen = np.unique(_ids(params.penalty_prompt + params.penalty_output))
        seen = seen[seen < vocab_size]
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        output, counts = np.unique(_ids(params.penalty_output), return_counts=True)
        lowered = (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
        known = output < vocab_size
        logits[output[known]] -= lowered[known]


def _ids(packed: bytes) -> npt.NDArray[np.uint32]:
    return np.frombuffer(packed, dtype="<u4")


def _filter(logits: Floats, params: DrawParams) -> tuple[Ids | None, Floats]:
    """Ids that may be drawn, rising (None: all), and their weights relative to that of the most likely token."""
    largest = logits.max()
    if not np.isfinite(largest):
        raise ValueError("no token is left that could be drawn")
    ids: Ids | None = None
    if 0 < params.top_k < len(logits):
        ids = _largest(logits, np.partition(logits, -params.top_k)[-params.top_k], params.top_k)
        logits = logits[ids]
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the largest 0
        weights: Floats = np.exp((logits - largest) * np.float32(1 / max(params.temperature, MIN_TEMPERATURE)))
    if params.top_p < 1:
        kept = _top_p(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= np.float32(min(params.min_p, 1.0)))
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _largest(values: Floats, edge: np.float32, count: int) -> Ids:
    """Indices, rising, of the `count` largest, of which `edge` is the smallest; the lowest indices among equals."""
    indices = np.flatnonzero(values >= edge)
    if surplus := len(indices) - count:
        at_edge = np.flatnonzero(values[indices] == edge)
        indices = np.delete(indices, at_edge[-surplus:])
    return indices


def _top_p(weights: Floats, top_p: float) -> Ids:
    """Indices, rising, of the fewest largest weights that make up `top_p` of all; the lowest indices among equals."""
    total = weights.sum(dtype=np.float64)
    goal = top_p * total
    # n weights below (1 - top_p) / n of the total cannot make up 1 - top_p of it: the edge is not among them.
    pool = weights[weights >= total * ((1 - top_p) / len(weights))]
    above, num_above = 0.0, 0
    while True:  # quickselect by mass: a part of the pool is left behind in each round
        edge = pool[len(pool) // 2]
        upper, num_equal = pool[pool > edge], int(np.count_nonzero(pool == edge))
        mass = above + float(upper.sum(dtype=np.float64))
        if mass >= goal and len(upper):
            pool = upper
            continue
        lower = pool[pool < edge]
        if mass + num_equal * float(edge) >= goal or not len(lower):
            wanted = min(num_equal, max(1, int(np.ceil((goal - mass) / float(edge)))))
            return _largest(weights, edge, num_above + len(upper) + wanted)
        above, num_above, pool = mass + num_equal * float(edge), num_above + len(upper) + num_equal, lower
