"""The page that lists the metrics lists all of them, and no other."""

import re

from .dockerfile import ROOT
from .exposed import exposed

#: Made of the ones listed.
PARTS = re.compile(r"_(bucket|count|sum|created)$")
#: Of the client library; the page names the four that are drawn.
PROCESS = re.compile(r"^(process_|python_|up$|vllm:)")


def listed() -> set[str]:
    page = (ROOT / "docs/observability.md").read_text()
    metrics = page[page.index("## Metrics") : page.index("### vLLM's names")]
    first_cells = [line.split(" | ")[0] for line in metrics.splitlines() if line.startswith("| `")]
    return {name for cell in first_cells for name in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", cell)}


def test_every_metric_has_its_place_and_none_is_made_up() -> None:
    names = {name for samples in exposed().values() for name in samples if not PROCESS.search(name)}
    histograms = {PARTS.sub("", name) for name in names if name.endswith("_bucket")}
    others = {name for name in names if PARTS.sub("", name) not in histograms and not name.endswith("_created")}
    assert listed() == {name.removeprefix("fastserve:") for name in histograms | others}


def test_labels_of_a_metric_are_those_that_it_has() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    known = {
        name.removeprefix("fastserve:"): labels for samples in exposed().values() for name, labels in samples.items()
    }
    for name, labels in re.findall(r"^\|.*?`(\w+)\{([\w,]+)\}`", page, re.MULTILINE):
        found = known.get(name) or known[f"{name}_count"]
        assert set(labels.split(",")) <= found, name
