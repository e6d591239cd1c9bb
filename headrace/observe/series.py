"""Counters, gauges and histograms as plain Python values.

They are written thousands of times per second and read every few seconds, so writing is cheap: an addition without a
lock, and a bisection for a histogram. Reading converts them to metric families of prometheus-client, which writes the
exposition format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

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

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

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
