"""The page for ``/metrics``: families that folds write to, under one prefix and with one set of constant labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from headrace.observe.series import Cell, Family, Histogram, counter_family, gauge_family, histogram_family


class MetricsPage:
    """Families of counters, gauges and histograms.

    ``prefix`` is ``headrace`` or ``vllm``: metrics are called ``<prefix>:<name>``. ``constant`` are labels that every
    series carries. Writing and rendering may happen in different threads: each number is whole, and a scrape that falls
    between two additions sees the first without the second.
    """

    def __init__(self, prefix: str = "headrace", constant: Mapping[str, str] | None = None) -> None:
        self._prefix = prefix
        self._constant = dict(constant or {})
        self.counters: list[Family[Cell]] = []
        self.gauges: list[Family[Cell]] = []
        self.histograms: list[Family[Histogram]] = []
        self._before: list[Callable[[], object]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def counter(self, name: str, help: str, labels: Sequence[str] = (), limit: int = 100) -> Family[Cell]:
        """A new family of counters; the page adds ``_total`` to its name. ``limit``: see `series.Family`."""
        self.counters.append(Family(f"{self._prefix}:{name}", help, Cell, labels, limit))
        return self.counters[-1]

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Family[Cell]:
        """A new family of gauges."""
        self.gauges.append(Family(f"{self._prefix}:{name}", help, Cell, labels))
        return self.gauges[-1]

    def histogram(
        self, name: str, help: str, bounds: tuple[float, ...], labels: Sequence[str] = ()
    ) -> Family[Histogram]:
        """A new family of histograms with the buckets' inclusive upper ends ``bounds``."""
        family = Family(f"{self._prefix}:{name}", help, lambda: Histogram(bounds), labels)
        self.histograms.append(family)
        return family

    def before_render(self, measure: Callable[[], object]) -> None:
        """Have ``measure`` called whenever the page is asked for: for what is looked at and not counted."""
        self._before.append(measure)

    def render(self) -> bytes:
        """The page, in Prometheus' text format."""
        for measure in self._before:
            measure()
        page: bytes = generate_latest(self._registry)
        return page

    def collect(self) -> Iterator[Metric]:
        """All families, for prometheus-client's registry."""
        for counters in self.counters:
            yield counter_family(counters, self._constant)
        for gauges in self.gauges:
            yield gauge_family(gauges, self._constant)
        for histograms in self.histograms:
            yield histogram_family(histograms, self._constant)
