"""The numbers behind a metrics page: counters, gauges and histograms as plain Python values.

A fold writes them thousands of times a second and a scrape reads them every few seconds, so writing is the
cheap side: an addition, or a bisection and an addition, without locks. Reading turns them into families of
prometheus-client, which knows the exposition format. They know no event and no metric's name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

OTHER = "other"
"""The label value that stands for all label values beyond a family's limit."""


class Cell:
    """One counter or gauge: whoever owns it adds to ``value``."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Histogram:
    """Counts of observations per bucket, and their sum.

    ``bounds`` are the buckets' inclusive upper ends in ascending order; one more bucket takes what is above.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """The buckets as Prometheus wants them: upper end, and how many observations were at most that."""
        buckets, running = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(running)))
        return buckets


SeriesT = TypeVar("SeriesT", Cell, Histogram)


class Family(Generic[SeriesT]):
    """Series of one name, told apart by label values; beyond ``limit`` values of the first label all go to `OTHER`.

    The first label names who or what is counted; the others are closed sets. The limit keeps a caller who invents
    tenants from growing the memory of the server and its scrape.
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
        """The series of these label values, made on first use. Keep it where it is needed often."""
        series = self.series.get(values)
        if series is None:
            # Prometheus takes NUL for the end of the page, and with it refuses all of it.
            values = tuple(value.replace("\0", "\ufffd") for value in values)
            if len(self._named) < self.limit:
                self._named.update(values[:1])
            elif values[0] not in self._named:
                values = (OTHER, *values[1:])
            series = self.series.setdefault(values, self._make())
        return series


def counter_family(family: Family[Cell], constant: dict[str, str]) -> Metric:
    """A family of counters as prometheus-client's, with ``constant`` labels before its own."""
    metric = CounterMetricFamily(family.name, family.help, labels=[*constant, *family.labels])
    for values, cell in list(family.series.items()):
        metric.add_metric([*constant.values(), *values], cell.value)
    return metric


def gauge_family(family: Family[Cell], constant: dict[str, str]) -> Metric:
    """A family of gauges as prometheus-client's, with ``constant`` labels before its own."""
    metric = GaugeMetricFamily(family.name, family.help, labels=[*constant, *family.labels])
    for values, cell in list(family.series.items()):
        metric.add_metric([*constant.values(), *values], cell.value)
    return metric


def histogram_family(family: Family[Histogram], constant: dict[str, str]) -> Metric:
    """A family of histograms as prometheus-client's, with ``constant`` labels before its own."""
    metric = HistogramMetricFamily(family.name, family.help, labels=[*constant, *family.labels])
    for values, histogram in list(family.series.items()):
        metric.add_metric([*constant.values(), *values], histogram.cumulative(), histogram.total)
    return metric
