"""Claims: the host blocks that waiting requests will start with, and the copies that they wait for.

Without a claim, blocks fetched for later requests, or a request's own later blocks, could evict its first blocks in
every step. A claim also records whether anything that its request waits for has arrived; until then, the request is not
looked up again.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.memory.eviction import Block
from headrace.core.memory.lower_tier import Held, LowerTier
from headrace.core.plan import Arrival, Tier


class Claim:
    """The claim of one waiting request."""

    __slots__ = ("_coming", "_crowded", "_missed", "below", "blocks", "kept")

    def __init__(self, below: tuple[Held, ...], blocks: list[Block]) -> None:
        self.below = below  # what was found when it was made
        self.blocks = blocks  # pinned
        self.kept = True  # whether it was renewed since the last step began
        self._coming: set[int] = set()
        self._missed: tuple[Block, bytes | None] | None = None
        self._crowded = False

    def wait_for(self, coming: set[int], missed: Block | None, *, crowded: bool) -> None:
        """Wait for copies to these blocks of the host.

        The copy of ``missed`` and those after it could not start. ``crowded``: too many copies were in flight.
        """
        self._coming = coming
        self._missed = None if missed is None else (missed, missed.key)
        self._crowded = crowded and missed is not None

    def waits(self, *, room: bool) -> bool:
        """Whether nothing that it waits for has changed; ``room``: more copies could begin."""
        if not self._crowded and not self._coming:
            return False
        return self._missed is None or not (room or self._missed[0].key != self._missed[1])

    def arrived(self, came: set[int], failed: set[int]) -> None:
        """Copies to these blocks have ended, some of which failed."""
        if self._coming & failed:
            self.look_up_again()
        else:
            self._coming -= came

    def look_up_again(self) -> None:
        """Wait for nothing any more."""
        self._coming, self._crowded = set(), False


class Claims:
    """All claims on the blocks of the host tier. A claim that is not renewed in a step lapses at the one after it."""

    def __init__(self, host: LowerTier) -> None:
        self._host = host
        self._claims: list[Claim] = []

    @property
    def pins(self) -> int:
        """Number of pins that claims hold."""
        return sum(len(claim.blocks) for claim in self._claims)

    def make(self, below: tuple[Held, ...], old: Claim | None) -> Claim:
        """Pin the blocks of ``below`` that are in the host tier, in place of the request's ``old`` claim."""
        if old is not None and old.blocks and old.below == below:
            old.kept = True
            old.look_up_again()
            return old
        claim = Claim(below, [])
        self._claims.append(claim)
        for held in below:
            if held.tier is Tier.HOST:
                self.pin(claim, self._host.blocks[held.block])
        if old is not None:
            self.drop(old)
        return claim

    def pin(self, claim: Claim, block: Block) -> None:
        """Add a block of the host tier to a claim."""
        self._host.pin(block)
        claim.blocks.append(block)

    def keep(self, claim: Claim | None) -> None:
        """Renew the claim of a request that waits for an answer of peers, if it has one."""
        if claim is not None:
            claim.kept = True

    def waits(self, claim: Claim, *, room: bool) -> bool:
        """Whether a request need not be looked up again; that renews its claim."""
        waits = claim.waits(room=room)
        claim.kept = claim.kept or waits
        return waits

    def arrived(self, arrivals: Sequence[Arrival]) -> None:
        """Copies have ended; a request that waits for one that failed is looked up again."""
        ups = [each for each in arrivals if each.move.target_tier is Tier.HOST]
        came = {each.move.target for each in ups}
        failed = {each.move.target for each in ups if not each.ok}
        for claim in self._claims:
            claim.arrived(came, failed)

    def drop(self, claim: Claim) -> None:
        """Unpin the blocks of a claim whose request starts or ends; one that has lapsed is ignored."""
        if claim in self._claims:
            self._claims.remove(claim)
            self._lapse(claim)

    def advance(self) -> None:
        """A new step is planned: claims that were not renewed in the last one lapse."""
        kept = [claim for claim in self._claims if claim.kept]
        for claim in self._claims:
            if not claim.kept:
                self._lapse(claim)
            claim.kept = False
        self._claims = kept

    def reset(self) -> None:
        """The tier was cleared: all waiting requests are looked up again."""
        for claim in self._claims:
            claim.look_up_again()

    def _lapse(self, claim: Claim) -> None:
        self._host.unpin_all(claim.blocks[::-1])  # the end of the chain first, so that it is evicted first
        claim.blocks = []
        claim.look_up_again()
