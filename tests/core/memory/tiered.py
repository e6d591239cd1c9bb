"""A block pool over lower tiers, for tests of the tiers."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.block_keys import chained_key, root_key
from headrace.core.events import Event, Moved, MoveReason
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import CostAwareEviction, LeastRecentlyUsed
from headrace.core.memory.lower_tier import LowerTier
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.memory.restore import AlwaysRestore, RestorePolicy
from headrace.core.memory.tiers import LowerTiers
from headrace.core.plan import Arrival, Move, Tier

SIZE = 2
ROOT = root_key("", "")
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


class Scene:
    """A pool over lower tiers; prompts of whole blocks are computed and left to the cache at once."""

    def __init__(
        self, device: int, host: int, disk: int = 0, restore: RestorePolicy | None = None, root: bytes = ROOT
    ) -> None:
        self.events: list[Event] = []
        self.root = root
        self.lower = LowerTiers(
            LowerTier(HOST, host, CostAwareEviction(host)),
            LowerTier(DISK, disk, CostAwareEviction(disk)) if disk else None,
            restore or AlwaysRestore(),
            block_size=SIZE,
            block_bytes=100,
            emit=self.events.append,
        )
        self.pool = BlockPool(device, SIZE, LeastRecentlyUsed(), self.events.append, self.lower)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        keys = [self.root]
        for i in range(0, len(tokens) - 1, SIZE):
            keys.append(chained_key(keys[-1], tokens[i : i + SIZE]))
        return keys[1:]

    def match(self, *tokens: int, may_wait: bool = True) -> PrefixHit:
        return self.pool.match(self.root, self.keys(tokens), tokens, len(tokens), may_wait=may_wait)

    def run(self, *tokens: int) -> list[Move]:
        """One short life of a request: what it shares, what comes up, what it computes; its moves."""
        hit = self.match(*tokens)
        self.pool.share(hit.blocks)
        self.lower.hold(hit.below)
        table = [*hit.blocks, *self.pool.allocate(len(tokens) // SIZE - len(hit.blocks))]
        self.pool.promote(hit, table[len(hit.blocks) : hit.full])
        self.lower.emit_restored("r", len(hit.below), hit.declined)
        parents = [self.root, *self.keys(tokens)]
        for i in range(hit.full, len(table)):
            self.pool.register(table[i], parents[i], tokens[i * SIZE : (i + 1) * SIZE])
        self.pool.release(table)
        self.pool.check()
        return self.lower.take_moves()

    def land(self, moves: Sequence[Move], *, ok: bool = True) -> None:
        """Let those of the moves arrive that go to or come from the disk."""
        self.lower.arrived(Arrival(move, ok) for move in moves if DISK in move[2:])
        self.pool.check()

    def moved(self, reason: MoveReason) -> int:
        return sum(e.blocks for e in self.events if isinstance(e, Moved) and e.reason is reason)
