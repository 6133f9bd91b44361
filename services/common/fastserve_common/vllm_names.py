"""Some metrics once more under vLLM's names and labels, so that boards, autoscalers and routers made for it find them.

Each service says which of its families vLLM has too. What two services count, each as it sees it, is repeated by one of
them only: a sum over targets must not add it up twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "fastserve:"
VLLM_PREFIX = "vllm:"
#: What tells vLLM's engines of one server apart; here, the pipelines of one scheduler do that.
ENGINE_LABEL, REPLICA_LABEL = "engine", "replica"


@dataclass(frozen=True, slots=True)
class Alias:
    """A family, named without prefix. `theirs` empty: by the same name. `only`: (label, value) of the samples that are
    meant, where vLLM has a family for each value; the label is left out."""

    ours: str
    theirs: str = ""
    only: tuple[str, str] | None = None

    def of(self, family: Metric, model_name: str) -> Metric:
        ours, theirs = PREFIX + self.ours, VLLM_PREFIX + (self.theirs or self.ours)
        alias = Metric(theirs, family.documentation, family.type)
        for sample in family.samples:
            if self.only is None or sample.labels.get(self.only[0]) == self.only[1]:
                name = theirs + sample.name.removeprefix(ours)
                alias.samples.append(sample._replace(name=name, labels=self._labels(sample, model_name)))
        return alias

    def _labels(self, sample: Sample, model_name: str) -> dict[str, str]:
        labels = {**sample.labels, "model_name": model_name}
        labels[ENGINE_LABEL] = labels.pop(REPLICA_LABEL, "0")
        if self.only is not None:
            del labels[self.only[0]]
        return labels


class AliasCollector(Collector):
    """Everything of a registry, and the aliases."""

    def __init__(self, registry: CollectorRegistry, aliases: Sequence[Alias], model_name: str) -> None:
        self._registry, self._model_name = registry, model_name
        self._aliases: dict[str, list[Alias]] = {}
        for alias in aliases:
            self._aliases.setdefault(PREFIX + alias.ours, []).append(alias)

    def describe(self) -> list[Metric]:
        """Registering must not scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            for alias in self._aliases.get(family.name, ()):
                yield alias.of(family, self._model_name)


def aliased(registry: CollectorRegistry, aliases: Sequence[Alias], model_name: str) -> CollectorRegistry:
    """What to serve in place of `registry`."""
    both = CollectorRegistry()
    both.register(AliasCollector(registry, aliases, model_name))
    return both
