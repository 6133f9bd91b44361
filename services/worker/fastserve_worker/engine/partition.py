"""Where to cut a model: contiguous layers per stage, the most expensive stage as cheap as possible."""

from collections.abc import Sequence
from functools import cache

from fastserve_worker.engine.errors import UnsupportedModelError


def split_layers(layer_costs: Sequence[int], num_stages: int, head_cost: int) -> list[range]:
    """Cut layers into `num_stages` runs of at least one layer, minimising the largest sum of costs.

    The cost of a layer is the weight it streams per iteration (its parameters). The last stage also streams the
    vocabulary head; the embedding reads only the rows of the iteration's tokens, so it weighs nothing on the first.
    Among equal cuts the earliest stages get fewer layers. Raises UnsupportedModelError when stages outnumber layers.
    """
    num_layers = len(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise UnsupportedModelError(f"cannot cut {num_layers} layers into {num_stages} stages")

    prefix = [0]
    for cost in layer_costs:
        prefix.append(prefix[-1] + cost)

    @cache
    def best(begin: int, stages: int) -> tuple[int, tuple[int, ...]]:
        """Smallest possible largest cost of layers [begin, end) in `stages` stages, with the cuts."""
        if stages == 1:
            return prefix[num_layers] - prefix[begin] + head_cost, (num_layers,)
        options = []
        for end in range(begin + 1, num_layers - stages + 2):
            rest, cuts = best(end, stages - 1)
            options.append((max(prefix[end] - prefix[begin], rest), (end, *cuts)))
        return min(options)

    cuts = best(0, num_stages)[1]
    return [range(begin, end) for begin, end in zip((0, *cuts[:-1]), cuts, strict=True)]
