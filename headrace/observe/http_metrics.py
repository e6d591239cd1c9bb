"""Counts HTTP responses by route, method and status class."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


# Bytes of HTTP traffic, and seconds of tokenization and detokenization.


class Traffic:
    """Writes to ``page``. ``text_seconds`` returns the seconds of ``tokenize`` and ``detokenize`` so far."""

    def __init__(self, page: MetricsPage, text_seconds: Callable[[], Mapping[str, float]] = dict) -> None:
        self._received = page.counter("http_received_bytes", "Bytes of the bodies of HTTP requests.").of()
        self._sent = page.counter("http_sent_bytes", "Bytes of the bodies of HTTP responses.").of()
        self._text = page.counter(
            "text_seconds",
            "Time of turning prompts into tokens (tokenize) and tokens into text (detokenize).",
            ["part"],
        )
        self._text_seconds = text_seconds
        page.before_render(self.measure)

    def count(self, received: int, sent: int) -> None:
        """One HTTP exchange has ended."""
        self._received.value += received
        self._sent.value += sent

    def measure(self) -> None:
        """Bring the seconds up to date."""
        for part, seconds in self._text_seconds().items():
            self._text.of(part).value = seconds
