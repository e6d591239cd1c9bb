"""The result of a prefix cache lookup: which blocks are shared, copied, or fetched from a lower tier."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.memory.lower_tier import Held
from headrace.core.plan import Tier


class PrefixHit(NamedTuple):
    """The cached prefix of a sequence: whole blocks to share, whole blocks to restore from lower tiers, and one of
    which ``copied`` tokens match. ``declined`` further blocks are in lower tiers, but are faster to compute.

    Of a model with recurrent states, the prefix ends at a ``checkpoint``, the number of its cell. The ``beyond`` cached
    blocks that follow it are computed again. So are those behind the last place that window layers can continue from.
    """

    blocks: tuple[int, ...]
    source: int
    copied: int
    below: tuple[Held, ...] = ()
    declined: int = 0
    checkpoint: int = -1
    beyond: int = 0

    @property
    def full(self) -> int:
        """Number of whole blocks that need no computing."""
        return len(self.blocks) + len(self.below)

    @property
    def is_ready(self) -> bool:
        """Whether all of it can be used in the step that is being planned."""
        return all(held.tier is Tier.HOST and held.ready for held in self.below)

    def tokens(self, block_size: int) -> int:
        return self.full * block_size + self.copied


NO_HIT = PrefixHit((), 0, 0)
