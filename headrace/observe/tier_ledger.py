"""Counts KV offloading: bytes moved between tiers, blocks restored, and failed copies."""

from __future__ import annotations

from headrace.core.events import Moved, MoveReason, RestoreDeclined, TransferFailed
from headrace.observe.metrics_page import MetricsPage


class TierLedger:
    """Counts events of `core.memory.tiers`, which `observe.metrics` passes on."""

    def __init__(self, page: MetricsPage) -> None:
        self._bytes = page.counter(
            "kv_offload_bytes",
            "Bytes of KV blocks copied between tiers, by reason.",
            ["source", "target", "reason"],
        )
        self._hits = page.counter(
            "kv_offload_hits", "KV blocks restored from a lower tier for a request."
        ).of()
        self._declined = page.counter(
            "kv_offload_declined_tokens",
            "Tokens in a lower tier that were computed instead, because that was faster.",
        ).of()
        self._failures = page.counter(
            "kv_offload_failures",
            "Copies of KV blocks to or from the disk that failed.",
            ["source", "target"],
        )

    def moved(self, event: Moved, now: float) -> None:
        """Blocks were copied."""
        self._bytes.of(event.source.value, event.target.value, event.reason.value).value += event.bytes
        if event.reason is MoveReason.RESTORED:
            self._hits.value += event.blocks

    def declined(self, event: RestoreDeclined, now: float) -> None:
        """Tokens are computed although a lower tier has them."""
        self._declined.value += event.tokens

    def failed(self, event: TransferFailed, now: float) -> None:
        """A copy failed."""
        self._failures.of(event.source.value, event.target.value).value += 1
