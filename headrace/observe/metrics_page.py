"""The page of ``/metrics``: metric families under one prefix, with labels that every series carries."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

# Counters, gauges and histograms as plain Python values.

OTHER = "other"
"""Label value of all series beyond the limit of a family."""


class Cell:
    """One counter or gauge; its owner changes ``value``."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Histogram:
    """Counts of observations per bucket, and their sum.

    ``bounds`` are the inclusive upper ends of the buckets in ascending order; a last bucket takes larger values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """The cumulative buckets of Prometheus: upper end, and the number of observations up to it."""
        buckets, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(running)))
        return buckets


SeriesT = TypeVar("SeriesT", Cell, Histogram)


class Family(Generic[SeriesT]):
    """Series of one metric by label values; beyond ``limit`` values of the first label, all belong to `OTHER`.

    Other labels must have few values. The limit prevents clients that invent tenants from filling memory and scrapes.
    """

    __slots__ = ("_make", "_named", "help", "labels", "limit", "name", "series")

    def __init__(
        self, name: str, help: str, make: Callable[[], SeriesT], labels: Sequence[str] = (), limit: int = 100
    ) -> None:
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        self.limit = limit
        self.series: dict[tuple[str, ...], SeriesT] = {}
        self._make: Callable[[], SeriesT] = make
        self._named: set[str] = set()
        if not self.labels:
            self.of()

    def of(self, *values: str) -> SeriesT:
        """The series with these label values, created on first use. Keep a reference if it is used often."""
        series = self.series.get(values)
        if series is None:
            # Prometheus rejects a page that contains a NUL character.
            values = tuple(value.replace("\0", "\ufffd") for value in values)
            if len(self._named) < self.limit:
                self._named.update(values[:1])
            elif values[0] not in self._named:
                values = (OTHER, *values[1:])
            series = self.series.setdefault(values, self._make())
        return series


def counter_family(family: Family[Cell], constant: dict[str, str]) -> Metric:
    """A family of counters for prometheus-client, with ``constant`` labels before its own."""
    metric = CounterMetricFamily(family.name, family.help, labels=[*constant, *family.labels])
    for values, cell in list(family.series.items()):
        metric.add_metric([*constant.values(), *values], cell.value)
    return metric


def gauge_family(family: Family[Cell], constant: dict[str, str]) -> Metric:
    """A family of gauges for prometheus-client, with ``constant`` labels before its own."""
    metric = GaugeMetricFamily(family.name, family.help, labels=[*constant, *family.labels])
    for values, cell in list(family.series.items()):
        metric.add_metric([*constant.values(), *values], cell.value)
    return metric


def histogram_family(family: Family[Histogram], constant: dict[str, str]) -> Metric:
    """A family of histograms for prometheus-client, with ``constant`` labels before its own."""
    metric = HistogramMetricFamily(family.name, family.help, labels=[*constant, *family.labels])
    for values, histogram in list(family.series.items()):
        metric.add_metric([*constant.values(), *values], histogram.cumulative(), histogram.total)
    return metric


# Names and labels of ``--metrics-prefix vllm``, so that dashboards and autoscalers made for vLLM work unchanged.

PREFIX = "vllm"

LABELS = {"engine": "0"}
"""Labels that vLLM adds to every series, in addition to ``model_name``."""

ALIASES = {
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "estimated_flops_per_gpu": "estimated_flops",
}
"""Current and former names of vLLM, with ours."""


def labels(prefix: str, model: str) -> dict[str, str]:
    """The labels of every series of a page."""
    return {"model_name": model} | (LABELS if prefix == PREFIX else {})


def aliases(prefix: str) -> dict[str, str]:
    """The aliases of a page."""
    return ALIASES if prefix == PREFIX else {}


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
        """Add a family of counters; the page appends ``_total`` to its name. ``limit``: see `Family`."""
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
