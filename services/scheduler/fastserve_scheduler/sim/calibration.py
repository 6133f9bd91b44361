"""What was measured by others and by us, beside what the roofline says: each error is stated, and held by a test.

Sources. DistServe: fits in its repository (github.com/LLMServe/DistServe, Apache-2.0, simdistserve/estimators/
profile_data/profiler-a100-80g.distserve.json), evaluated at these points. Vidur: medians in data/profiling/compute of
github.com/microsoft/vidur (MIT), every operator but attention, summed over the layers: linear layers alone. Paper: the
FastServe paper. Ours: docs/benchmarks.md, one decode iteration in one thread.

The paper's OPT-2.7B is not met, and cannot be: 2 ms a decode is less than reading 5.3 GB of weights takes an A100
(3.4 ms at its full 1.555 TB/s), and its prefill of 1,024 tokens is three times as long as that of other engines.
"""

from dataclasses import dataclass
from typing import Literal

from fastserve_scheduler.sim.cost import decode_plan, iteration_ns, prefill_plan
from fastserve_scheduler.sim.devices import DEVICES
from fastserve_scheduler.sim.models import MODELS
from fastserve_scheduler.sim.roofline import RooflineCost


@dataclass(frozen=True, slots=True)
class Point:
    """One iteration. `size`: prompt tokens, or the context of each of `batch` decodes; of `linear`: tokens.

    `error_percent`: predicted over measured, less one. `fitted`: the device's numbers were chosen with it.
    """

    source: str
    model: str
    device: str
    kind: Literal["prefill", "decode", "linear"]
    size: int
    measured_ms: float
    error_percent: float
    batch: int = 1
    tp: int = 1
    pp: int = 1
    fitted: bool = True

    @property
    def name(self) -> str:
        return f"{self.source}-{self.model}-{self.device}-tp{self.tp}-pp{self.pp}-{self.kind}-{self.batch}x{self.size}"


def predicted_ms(point: Point) -> float:
    cost = RooflineCost(MODELS[point.model], DEVICES[point.device], point.tp, point.pp)
    if point.kind == "linear":
        return cost.linear_ms(point.size)
    plan = prefill_plan(point.size) if point.kind == "prefill" else decode_plan(point.batch, point.size)
    return iteration_ns(cost, plan, point.pp) / 1e6


CALIBRATION: tuple[Point, ...] = (
    Point("distserve", "opt-13b", "a100-80", "prefill", 128, 31.26, -4.3),
    Point("distserve", "opt-13b", "a100-80", "prefill", 512, 72.15, 1.6),
    Point("distserve", "opt-13b", "a100-80", "prefill", 1_024, 129.93, 5.4),
    Point("distserve", "opt-13b", "a100-80", "prefill", 2_048, 256.69, 5.7),
    Point("distserve", "opt-13b", "a100-80", "decode", 128, 20.05, 4.2, batch=1),
    Point("distserve", "opt-13b", "a100-80", "decode", 512, 25.69, 1.3, batch=16),
    Point("distserve", "opt-13b", "a100-80", "decode", 512, 42.94, 1.1, batch=64),
    Point("distserve", "opt-66b", "a100-80", "prefill", 128, 48.95, -5.1, tp=4),
    Point("distserve", "opt-66b", "a100-80", "prefill", 512, 109.11, -1.0, tp=4),
    Point("distserve", "opt-66b", "a100-80", "prefill", 1_024, 193.15, 1.8, tp=4),
    Point("distserve", "opt-66b", "a100-80", "prefill", 2_048, 374.3, 1.6, tp=4),
    Point("distserve", "opt-66b", "a100-80", "decode", 128, 30.88, 6.4, batch=1, tp=4),
    Point("distserve", "opt-66b", "a100-80", "decode", 512, 35.48, 5.3, batch=16, tp=4),
    Point("distserve", "opt-66b", "a100-80", "decode", 512, 49.62, 7.4, batch=64, tp=4),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 1, 9.347, -9.3),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 64, 9.766, 4.8),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 128, 12.345, 6.2),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 256, 17.951, 11.3),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 512, 33.613, 4.2),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 1_024, 68.381, -2.8),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 2_048, 134.438, -3.1),
    Point("vidur", "llama-2-7b", "a100-80", "linear", 4_096, 260.379, -0.7),
    Point("vidur", "llama-2-7b", "h100", "linear", 1, 5.634, -0.5),
    Point("vidur", "llama-2-7b", "h100", "linear", 64, 5.924, 1.1),
    Point("vidur", "llama-2-7b", "h100", "linear", 128, 6.438, 3.6),
    Point("vidur", "llama-2-7b", "h100", "linear", 256, 9.257, -9.0),
    Point("vidur", "llama-2-7b", "h100", "linear", 512, 12.128, 4.2),
    Point("vidur", "llama-2-7b", "h100", "linear", 1_024, 21.278, 3.1),
    Point("vidur", "llama-2-7b", "h100", "linear", 2_048, 40.859, 1.4),
    Point("vidur", "llama-2-7b", "h100", "linear", 4_096, 84.583, -4.2),
    Point("paper", "opt-175b", "a100-40", "decode", 512, 60.0, -8.8, tp=8, pp=2),
    Point("paper", "opt-2.7b", "a100-40", "prefill", 128, 10.0, -5.8, fitted=False),
    Point("paper", "opt-2.7b", "a100-40", "prefill", 1_024, 90.0, -65.5, fitted=False),
    Point("paper", "opt-2.7b", "a100-40", "decode", 128, 2.0, 289.7, fitted=False),
    Point("ours", "smollm2-135m", "cpu-1", "decode", 128, 42.2, -8.2, batch=1),
    Point("ours", "smollm2-135m", "cpu-1", "decode", 128, 40.2, 13.8, batch=4),
    Point("ours", "smollm2-135m", "cpu-1", "decode", 128, 54.1, 6.7, batch=8),
    Point("ours", "smollm2-135m", "cpu-1", "decode", 128, 84.2, 1.9, batch=16),
    Point("ours", "smollm2-135m", "cpu-1", "decode", 512, 129.3, -3.3, batch=16),
)
