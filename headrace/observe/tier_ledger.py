"""The ledger of what lies below the device: bytes moved from tier to tier, and what they were good for."""

from __future__ import annotations

from headrace.core.events import Moved, MoveReason, RestoreDeclined, TransferFailed
from headrace.observe.metrics_page import MetricsPage


class TierLedger:
    """A fold over the events of `core.memory.tiers`; `observe.metrics` hands them on."""

    def __init__(self, sheet: MetricsPage) -> None:
        self._bytes = sheet.counter(
            "kv_offload_bytes",
            "Bytes of keys and values copied between tiers.",
            ["source", "target", "reason"],
        )
        self._hits = sheet.counter("kv_offload_hits", "Blocks that requests got from a lower tier.").of()
        self._declined = sheet.counter(
            "kv_offload_declined_tokens", "Tokens in a lower tier that were quicker to compute."
        ).of()
        self._failures = sheet.counter(
            "kv_offload_failures", "Copies to or from the disk that failed.", ["source", "target"]
        )

    def moved(self, event: Moved, now: float) -> None:
        """Blocks are copied."""
        self._bytes.of(event.source.value, event.target.value, event.reason.value).value += event.bytes
        if event.reason is MoveReason.RESTORED:
            self._hits.value += event.blocks

    def declined(self, event: RestoreDeclined, now: float) -> None:
        """Tokens are computed though they lie below."""
        self._declined.value += event.tokens

    def failed(self, event: TransferFailed, now: float) -> None:
        """A copy has failed."""
        self._failures.of(event.source.value, event.target.value).value += 1
