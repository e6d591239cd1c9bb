"""Counts KV offloading and transfer: bytes moved between tiers, blocks restored or pulled, and failed copies."""

from __future__ import annotations

from headrace.core.events import Moved, MoveReason, RestoreDeclined, TransferFailed
from headrace.core.peers import PeersAnswered, Pulled
from headrace.observe.metrics_page import MetricsPage


class TierMetrics:
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
        self._asked = page.counter(
            "external_prefix_cache_queries",
            "Prompt tokens that peers were asked for, because they were missing here.",
        ).of()
        self._held = page.counter(
            "external_prefix_cache_hits", "Prompt tokens that a peer held when it was asked."
        ).of()
        self._pulled = page.counter("kv_transfer_blocks", "KV blocks pulled from peers.").of()
        self._pulled_bytes = page.counter("kv_transfer_bytes", "Bytes of KV blocks pulled from peers.").of()
        self._seconds = page.counter(
            "kv_transfer_seconds", "Time that pulling KV blocks from peers took."
        ).of()
        self._lost = page.counter(
            "kv_transfer_failed_blocks", "KV blocks that a peer no longer held or did not deliver in time."
        ).of()

    def moved(self, event: Moved, now: float) -> None:
        """Blocks were copied."""
        self._bytes.of(event.source.value, event.target.value, event.reason.value).value += event.bytes
        if event.reason is MoveReason.RESTORED:
            self._hits.value += event.blocks

    def declined(self, event: RestoreDeclined, now: float) -> None:
        """Tokens are computed although a lower tier has them."""
        self._declined.value += event.tokens

    def answered(self, event: PeersAnswered, now: float) -> None:
        """Peers were asked for a prompt's blocks."""
        self._asked.value += event.asked_tokens
        self._held.value += event.held_tokens

    def pulled(self, event: Pulled, now: float) -> None:
        """Copies from peers have ended."""
        self._pulled.value += event.blocks
        self._pulled_bytes.value += event.bytes
        self._seconds.value += event.seconds
        self._lost.value += event.failed

    def failed(self, event: TransferFailed, now: float) -> None:
        """A copy failed."""
        self._failures.of(event.source.value, event.target.value).value += 1
