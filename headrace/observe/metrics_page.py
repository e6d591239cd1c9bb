"""The page of ``/metrics``: metric families under one prefix, with labels that every series carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric

from headrace.observe.series import Cell, Family, Histogram, counter_family, gauge_family, histogram_family


class MetricsPage:
    """Families of counters, gauges and histograms.

    ``prefix`` is ``headrace`` or ``vllm``: a metric is called ``<prefix>:<name>``. ``constant`` are labels that every
    series carries. ``aliases`` are second names of families, as older dashboards know them. Writing and rendering may
    happen in different threads: a scrape between two additions sees the first without the second.
    """

    def __init__(
        self,
        prefix: str = "headrace",
        constant: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._prefix = prefix
        self._constant = dict(constant or {})
        self._aliases = {f"{prefix}:{old}": f"{prefix}:{name}" for old, name in (aliases or {}).items()}
        self.counters: list[Family[Cell]] = []
        self.gauges: list[Family[Cell]] = []
        self.histograms: list[Family[Histogram]] = []
        self._before: list[Callable[[], object]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def counter(self, name: str, help: str, labels: Sequence[str] = (), limit: int = 100) -> Family[Cell]:
        """Add a family of counters; the page appends ``_total`` to its name. ``limit``: see `series.Family`."""
        self.counters.append(Family(f"{self._prefix}:{name}", help, Cell, labels, limit))
        return self.counters[-1]

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Cell]:
        """Add a family of gauges."""
        self.gauges.append(Family(f"{self._prefix}:{name}", help, Cell, labels))
        return self.gauges[-1]

    def histogram(
        self, name: str, help: str, bounds: tuple[float, ...], labels: Sequence[str] = ()
    ) -> Family[Histogram]:
        """Add a family of histograms; ``bounds`` are the inclusive upper ends of its buckets."""
        family = Family(f"{self._prefix}:{name}", help, lambda: Histogram(bounds), labels)
        self.histograms.append(family)
        return family

    def before_render(self, measure: Callable[[], object]) -> None:
        """Call ``measure`` before the page is rendered, for values that are measured and not counted."""
        self._before.append(measure)

    def add_process(self) -> None:
        """Add metrics of this process and of Python's garbage collector, under the names of prometheus-client."""
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def render(self) -> bytes:
        """Render the page in Prometheus' text format."""
        page: bytes = generate_latest(self._registry)
        return page

    def collect(self) -> Iterator[Metric]:
        """All families and their aliases, for prometheus-client's registry."""
        for measure in self._before:
            measure()
        for counters in self.counters:
            yield from self._with_aliases(counter_family(counters, self._constant))
        for gauges in self.gauges:
            yield from self._with_aliases(gauge_family(gauges, self._constant))
        for histograms in self.histograms:
            yield from self._with_aliases(histogram_family(histograms, self._constant))

    def _with_aliases(self, metric: Metric) -> Iterator[Metric]:
        yield metric
        for alias, name in self._aliases.items():
            if name == metric.name:
                copy = Metric(alias, f"Alias of {name}.", metric.type)
                copy.samples = [
                    sample._replace(name=alias + sample.name.removeprefix(name)) for sample in metric.samples
                ]
                yield copy
