"""The lower tier of blocks that peers hold.

A block of this tier records which peer held a key when it was asked; its content is not here. It is fetched like a
block of the disk, and the fetch may fail.
"""

from __future__ import annotations

from headrace.core.memory.lower_tier import LowerTier, Saved
from headrace.core.peers import NO_OFFER, Inquiry, Offer, Peers


class PeerBlocks:
    """The tier of blocks held by peers, and the connection to them."""

    def __init__(self, tier: LowerTier, peers: Peers) -> None:
        self.tier = tier
        self._peers = peers

    def ask(self, inquiry: Inquiry) -> None:
        """Begin to ask; an inquiry without keys is answered at once."""
        if inquiry.keys:
            self._peers.ask(inquiry)
        else:
            inquiry.answer, inquiry.taken = NO_OFFER, True

    def take(self, inquiry: Inquiry, offer: Offer, block_size: int) -> None:
        """Store the answer to an inquiry; of an earlier answer, only blocks that are being fetched stay."""
        inquiry.taken = True
        parent, at = inquiry.parent, 0
        for key in inquiry.keys[: min(offer.blocks, self.tier.num_blocks)]:
            tokens = inquiry.tokens[at : at + block_size]
            block = self.tier.find(key, tokens)
            if block is None and key not in self.tier:
                block = self.tier.make_room()
                if block is None:
                    break
                self.tier.adopt(Saved(block.id, parent, key, tokens))
            if block is not None and not block.refs:
                self.tier.touch(block)
                self._peers.assign(block.id, offer.peer, key)
            parent, at = key, at + block_size
