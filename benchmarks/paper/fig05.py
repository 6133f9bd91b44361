"""Figure 5: what one job's first four iterations take, by length of its prompt.

One job alone goes through the simulator, and the times are those between its plans. The paper's numbers for OPT-2.7B
are also what the scheduler's profile is made of; the roofline and a fit of another group to OPT-13B are beside them.
"""

import sys

from matplotlib.figure import Figure as Plot

from fastserve_scheduler.core import CoreConfig, SchedulerCore
from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.events import JobArrived
from fastserve_scheduler.sim.cost import OPT_2_7B_PAPER, OPT_13B_A100, CostModel, profile_of
from fastserve_scheduler.sim.devices import DEVICES
from fastserve_scheduler.sim.models import MODELS
from fastserve_scheduler.sim.roofline import RooflineCost
from fastserve_scheduler.sim.simulator import Simulator

from .figure import Figure, Options, Report, Table, main
from .points import Store
from .style import panels

PROMPTS = (128, 256, 512, 1024)
ITERATIONS = 4
PAPER_MS = {128: (10.0, 2.0), 1024: (90.0, 2.0)}
"""First and later iterations, read from its figure."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")


def costs() -> dict[str, CostModel]:
    return {
        "OPT-2.7B as the paper has it": OPT_2_7B_PAPER,
        "OPT-2.7B, roofline of A100 40 GB": RooflineCost(MODELS["opt-2.7b"], DEVICES["a100-40"]),
        "OPT-13B, DistServe's fit to A100": OPT_13B_A100,
    }


def iterations_ms(cost: CostModel, prompt: int) -> list[float]:
    """Of one job that is alone."""
    core = SchedulerCore(CoreConfig(1, 16, 1, 2048, 2048), profile_of(cost, 1, 2048, 1))
    began_ns: list[int] = []

    def watch(now_ns: int, plan: RunIteration) -> None:
        began_ns.append(now_ns)

    result = Simulator(core, cost, watch=watch).run([(0, JobArrived(1, prompt, ITERATIONS))], num_blocks=256)
    ends_ns = [*began_ns[1:], result.end_ns]
    return [(end - begin) / 1e6 for begin, end in zip(began_ns, ends_ns, strict=True)]


def report(options: Options, store: Store) -> Report:
    found = {name: {prompt: iterations_ms(cost, prompt) for prompt in PROMPTS} for name, cost in costs().items()}
    rows = [
        [name, *(f"{times[0]:.1f} / {times[1]:.1f}" for times in by_prompt.values())]
        for name, by_prompt in found.items()
    ]
    rows.append(["paper, OPT-2.7B", *(_theirs(prompt) for prompt in PROMPTS)])
    table = Table("First / second iteration, ms, by tokens of prompt", ["", *map(str, PROMPTS)], rows)
    return Report([table], {"iterations_ms": found}, lambda: _draw(found))


def _theirs(prompt: int) -> str:
    return "{:g} / {:g}".format(*PAPER_MS[prompt]) if prompt in PAPER_MS else "-"


def _draw(found: dict[str, dict[int, list[float]]]) -> Plot:
    plot, axes = panels(1, len(found), width=3.4, height=2.8)
    for (name, by_prompt), each in zip(found.items(), axes, strict=True):
        for place, (prompt, times) in enumerate(by_prompt.items()):
            at = [iteration + 0.2 * (place - 1.5) for iteration in range(1, ITERATIONS + 1)]
            each.bar(at, times, width=0.19, color=COLOURS[place], label=f"{prompt} tokens")
        each.set(xlabel="iteration", xticks=range(1, ITERATIONS + 1), title=name)
    axes[0].set_ylabel("ms")
    axes[0].legend(fontsize=7, frameon=False)
    return plot


FIGURE = Figure("fig05", report)

if __name__ == "__main__":
    sys.exit(main(FIGURE))
