"""Counts saved KV memory: blocks moved between tiers or pulled from peers, and checkpoints of recurrent states."""

from __future__ import annotations

from headrace.core.events import (
    CheckpointDropped,
    Checkpointed,
    DropReason,
    Moved,
    MoveReason,
    Recomputed,
    RecomputeReason,
    RestoreDeclined,
    StateRestored,
    TransferFailed,
)
from headrace.core.peers import PeersAnswered, Pulled
from headrace.observe.metrics_page import MetricsPage


class TierMetrics:
    """Counts KV offloading and transfer, by events of `core.memory.tiers` that `observe.metrics` passes on."""

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


class CheckpointMetrics:
    """Counts events of `core.memory.checkpoints`, which `observe.metrics` passes on.

    ``checkpoint_bytes`` is the size of one checkpoint. All counts stay 0 for a model without recurrent states.
    """

    def __init__(self, page: MetricsPage, checkpoint_bytes: int) -> None:
        self._checkpoint_bytes = checkpoint_bytes
        self._count = page.gauge(
            "state_checkpoints", "Checkpoints of recurrent states from which a request can start."
        ).of()
        self._bytes = page.gauge("state_checkpoint_bytes", "Memory that these checkpoints take.").of()
        self._saves = page.counter(
            "state_checkpoint_saves", "Checkpoints of recurrent states that were made."
        ).of()
        self._restores = page.counter(
            "state_checkpoint_restores", "Requests that started from a checkpoint, also after a preemption."
        ).of()
        self._restored_tokens = page.counter(
            "state_checkpoint_restored_tokens", "Tokens that these requests did not have to compute."
        ).of()
        self._drops = page.counter(
            "state_checkpoint_drops",
            "Checkpoints that were dropped: evicted for another one, superseded by a later one of the same request, or"
            " dropped with the KV block that ends there.",
            ["reason"],
        )
        self._recomputed = page.counter(
            "state_recomputed_tokens",
            "Tokens that were computed although their keys and values were cached, because no recurrent state was saved"
            " there, by reason.",
            ["reason"],
        )
        for dropped in DropReason:
            self._drops.of(dropped.value)
        for reason in RecomputeReason:
            self._recomputed.of(reason.value)

    def saved(self, event: Checkpointed, now: float) -> None:
        """A checkpoint was made."""
        self._saves.value += 1
        self._add(1)

    def restored(self, event: StateRestored, now: float) -> None:
        """A request starts from a checkpoint."""
        self._restores.value += 1
        self._restored_tokens.value += event.tokens

    def dropped(self, event: CheckpointDropped, now: float) -> None:
        """A checkpoint was dropped."""
        self._drops.of(event.reason.value).value += 1
        self._add(-1)

    def recomputed(self, event: Recomputed, now: float) -> None:
        """Cached tokens are computed again."""
        self._recomputed.of(event.reason.value).value += event.tokens

    def _add(self, count: int) -> None:
        self._count.value += count
        self._bytes.value = self._count.value * self._checkpoint_bytes
