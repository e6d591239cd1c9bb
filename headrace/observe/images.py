"""Metrics of encoded images."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.observe.metrics_page import MetricsPage


class ImageCounts(NamedTuple):
    """Images of requests, those of them that had been encoded before, the memory of encoded images, and the time spent
    encoding.
    """

    queries: int
    hits: int
    nbytes: int
    seconds: float


class ImageMetrics:
    """The counts on a page, read when it is rendered; the first two have vLLM's names."""

    def __init__(self, page: MetricsPage, counts: Callable[[], ImageCounts]) -> None:
        self._counts = counts
        self._cells = (
            page.counter("mm_cache_queries", "Images of requests, looked up among the encoded ones.").of(),
            page.counter("mm_cache_hits", "Images of requests that had been encoded before.").of(),
            page.gauge("mm_cache_bytes", "Memory of encoded images, in bytes.").of(),
            page.counter("image_encoder_seconds", "Time spent encoding images, in seconds.").of(),
        )
        page.before_render(self._measure)

    def _measure(self) -> None:
        for cell, value in zip(self._cells, self._counts(), strict=True):
            cell.value = value
