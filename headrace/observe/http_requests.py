"""Counts HTTP responses by route, method and status class."""

from __future__ import annotations

from headrace.observe.metrics_page import MetricsPage

CLIENT_CLOSED = 499
METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpRequests:
    """Writes the counter ``http_requests`` to ``page``."""

    def __init__(self, page: MetricsPage) -> None:
        self._responses = page.counter(
            "http_requests",
            "HTTP responses. The route is the path pattern, or unmatched; the status is 2xx, 4xx or 5xx.",
            ["route", "method", "status"],
        )

    def count(self, route: str, method: str, status: int) -> None:
        """One response has ended; a ``status`` of 0 means that the client disconnected before it began."""
        label = method if method in METHODS else "other"
        self._responses.of(route, label, f"{(status or CLIENT_CLOSED) // 100}xx").value += 1
