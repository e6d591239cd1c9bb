"""Counts checkpoints of recurrent states: those there are, saved, restored and dropped, and tokens computed again."""

from __future__ import annotations

from headrace.core.events import (
    CheckpointDropped,
    Checkpointed,
    DropReason,
    Recomputed,
    RecomputeReason,
    StateRestored,
)
from headrace.observe.metrics_page import MetricsPage


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
