"""Data sheet of one replica: memory, decoding at several batch sizes, prefill, and the price of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.lab.forced_acceptance import Speculation
from headrace.lab.plan.capacity import Settings
from headrace.lab.plan.drafts import best_drafts, drafted
from headrace.lab.plan.roofline import Replica, chunk

BATCHES = (1, 8, 32, 64, 128, 256)
"""Batch sizes that a sheet shows."""


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step of ``batch`` sequences, with ``drafts`` drafted tokens each.

    ``mfu`` is relative to the devices' bf16 peak.
    """

    batch: int
    step_seconds: float
    tokens_per_second: float
    mfu: float
    dollars_per_million: float
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Sheet:
    """Figures of one replica. Bytes are summed over its devices; prices assume full utilization.

    ``sequences`` of ``context`` tokens fit in memory. ``decode`` has only batches that fit.
    """

    device: str
    degree: int
    context: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    sequences: int
    prefill_seconds: float
    prefill_mfu: float
    prefill_dollars_per_million: float
    decode: tuple[Decode, ...]
    dollars_per_hour: float

    @property
    def fits(self) -> bool:
        """Whether at least one sequence of the context fits."""
        return self.sequences > 0


def sheet(
    replica: Replica,
    settings: Settings,
    context: int,
    batches: Sequence[int] = BATCHES,
    speculation: Speculation | None = None,
) -> Sheet:
    """The sheet of a replica for prompts and contexts of ``context`` tokens."""
    blocks = replica.num_blocks(settings.block_size, settings.max_num_batched_tokens, settings.max_num_seqs)
    sequences = replica.sequences_that_fit(context, blocks, settings.block_size)
    per_second = replica.dollars_per_hour / 3600
    prefill = replica.prefill_seconds(context, settings.max_num_batched_tokens)
    prefill_flops = replica.flops(chunk(0, context, last=True))
    return Sheet(
        device=replica.device.name,
        degree=replica.degree,
        context=context,
        weight_bytes=replica.weight_bytes,
        workspace_bytes=replica.workspace_bytes(settings.max_num_batched_tokens, settings.max_num_seqs),
        kv_bytes_per_token=replica.kv_bytes_per_token,
        kv_tokens=blocks * settings.block_size,
        sequences=sequences,
        prefill_seconds=prefill,
        prefill_mfu=prefill_flops / (prefill * replica.degree * replica.device.bf16_flops),
        prefill_dollars_per_million=1e6 * per_second * prefill / context,
        decode=tuple(
            _decode(replica, batch, context, per_second, speculation)
            for batch in batches
            if batch <= sequences
        ),
        dollars_per_hour=replica.dollars_per_hour,
    )


def _decode(
    replica: Replica, batch: int, context: int, dollars_per_second: float, speculation: Speculation | None
) -> Decode:
    found = best_drafts(
        replica, lambda drafts, _: drafted(batch, context, drafts), batch, context, speculation
    )
    load, seconds, tokens = drafted(batch, context, found.drafts), found.seconds, batch * found.tokens
    dollars = 1e6 * dollars_per_second * seconds / tokens
    return Decode(batch, seconds, tokens / seconds, replica.mfu(load), dollars, found.drafts)
