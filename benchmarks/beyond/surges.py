"""A system that keeps up, then more than it can take, then the way back: what bursts and overload have in common."""

from matplotlib.figure import Figure as Plot

from .case import Case
from .looks import COLOURS
from .measure import CLASSES
from .orders import under
from .shared import Table, legend_below, panels
from .sheets import sheet, values
from .study import Report, Rows, cell, centre

CAPACITY = 1.84
"""Jobs per second of the set-up, measured by the part `capacity` of statements.py."""

ORDERS = ("fcfs", "paper", "alpha 10 s", "predicted")
TICKS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
COLUMNS = ("mean", "p95", "jct", "ttft", "wait", "peak_live", "recovery")


def surge(usual: float, high: float, lead_s: float, high_s: float, jobs: int) -> Case:
    """`usual` and `high` in jobs per second."""
    return Case(pattern=((lead_s, usual), (high_s, high), (1.0, usual)), rate=usual, jobs=jobs)


def cases_of(surges: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}, {order}": under(order, case) for name, case in surges.items() for order in ORDERS}


def report(rows: Rows, surges: dict[str, Case]) -> Report:
    tables: list[Table] = []
    found: dict[str, object] = {}
    for name, case in surges.items():
        cases = {order: under(order, case) for order in ORDERS}
        tables += [sheet(rows, name, cases, COLUMNS, "fcfs"), _classes(rows, name, cases)]
        found[name] = values(rows, cases, COLUMNS)
        found[f"{name}, by class"] = {
            order: [rows.at(each, "class_mean", index) for index in range(len(CLASSES))]
            for order, each in cases.items()
        }
    return Report(tables, found, lambda: _draw(rows, surges))


def _classes(rows: Rows, name: str, cases: dict[str, Case]) -> Table:
    titles = [f"{statistic}, {_class(index)}" for index in range(len(CLASSES)) for statistic in ("mean", "P95")]
    body = []
    for order, case in cases.items():
        cells = []
        for index in range(len(CLASSES)):
            cells += [cell(rows.at(case, key, index), 3) for key in ("class_mean", "class_p95")]
        body.append([order, *cells])
    return Table(f"{name}: s/token by length of the answer", ["", *titles], body)


def _class(index: int) -> str:
    low, high = CLASSES[index]
    return f"{low}-{high}" if high < 1 << 20 else f"{low}+"


def _draw(rows: Rows, surges: dict[str, Case]) -> Plot:
    plot, axes = panels(1, len(surges) + 1, width=3.4, height=2.9)
    width = 0.8 / len(ORDERS)
    for each, (name, case) in zip(axes, surges.items(), strict=False):
        for place, order in enumerate(ORDERS):
            bars = [centre(rows.at(under(order, case), "class_mean", index)) for index in range(len(CLASSES))]
            xs = [index + (place - 1.5) * width for index in range(len(CLASSES))]
            each.bar(xs, bars, width, color=COLOURS[order], label=order)
        each.set_xticks(range(len(CLASSES)), [_class(index) for index in range(len(CLASSES))])
        each.set(title=name, xlabel="tokens of the answer", yscale="log", ylim=(0.02, None))
        ticks = [tick for tick in TICKS_S if tick <= each.get_ylim()[1]]
        each.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        each.minorticks_off()
    axes[0].set_ylabel("mean latency (s/token)")
    last = axes[-1]
    for place, order in enumerate(ORDERS):
        bars = [centre(rows.of(under(order, case), "recovery")) for case in surges.values()]
        xs = [index + (place - 1.5) * width for index in range(len(surges))]
        last.bar(xs, bars, width, color=COLOURS[order])
    last.set_xticks(range(len(surges)), [name.split(" ")[0] for name in surges])
    last.set(title="time to recover", ylabel="s")
    legend_below(plot, axes[0], len(ORDERS))
    return plot
