"""Bytes of HTTP traffic, and seconds of tokenization and detokenization."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.observe.metrics_page import MetricsPage


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
