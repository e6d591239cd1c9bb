"""The requests that a draft model follows: their computed tokens, and the pages with keys and values.

```
 tokens     prompt ............ output ... | drafts of the last call
 computed   [========================][====]            keys and values that exist
 next call  ...................... a b c x              a, b accepted: they stay; c was computed, x was drawn instead
```
A page is registered when all its tokens are known, so requests with equal prefixes share it, and the next turn of a
chat finds it. The pages are only used for drafting, so all of them can be released at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.capacity import blocks_needed
from headrace.core.events import Event
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.request import Request


class Followed:
    """One request: ``computed`` positions have keys and values in the blocks of ``table``.

    The first ``known`` of them are positions of its tokens at the last call; the others are positions of ``drafted``
    tokens. ``number`` counts requests in the order in which the draft model began to follow them.
    """

    __slots__ = ("computed", "drafted", "known", "number", "parent", "registered", "row", "table")

    def __init__(self, number: int, parent: bytes, width: int) -> None:
        self.number = number
        self.parent = parent  # the key of the last registered block
        self.table: list[int] = []
        self.row = np.zeros(width, dtype=np.int32)  # the table as an array
        self.known = 0
        self.computed = 0
        self.registered = 0  # blocks
        self.drafted: Sequence[int] = ()

    def extend(self, blocks: Sequence[int]) -> None:
        """Append ``blocks`` to the table."""
        self.row[len(self.table) : len(self.table) + len(blocks)] = blocks
        self.table += blocks

    def observe(self, tokens: Sequence[int]) -> None:
        """Update the request's ``tokens``: accepted drafts count as computed, others do not."""
        right = self.known
        for drafted, token in zip(self.drafted, tokens[right : right + len(self.drafted)], strict=False):
            if drafted != token:
                break
            right += 1
        # The last token is always computed: its logits give the first draft.
        self.computed = min(self.computed, right, len(tokens) - 1)
        self.known = len(tokens)
        self.drafted = ()


class DraftPages:
    """The pages of a draft model, ``num_blocks`` of ``block_size`` tokens, divided among the requests it follows."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._pool = BlockPool(num_blocks, block_size, LeastRecentlyUsed(), _nobody_listens)
        self._width = blocks_needed(max_model_len, block_size)
        self._followed: dict[str, Followed] = {}  # least recently used first
        self._begun = 0

    @property
    def num_free(self) -> int:
        """Pages that no followed request holds."""
        return self._pool.num_free

    def __len__(self) -> int:
        """The number of followed requests."""
        return len(self._followed)

    def find(
        self, request: Request, tokens: Sequence[int], upto: int, asking: frozenset[str]
    ) -> Followed | None:
        """The state of a request with ``tokens``, with pages for ``upto`` positions; None if there are too few pages.

        Pages of requests that are not ``asking`` are released first.
        """
        state = self._followed.pop(request.id, None)
        if state is not None and len(tokens) < state.known:  # not the request that was followed
            self._pool.release(state.table)
            state = None
        if state is None:
            state = self._begin(request, tokens)
        else:
            state.observe(tokens)
        missing = blocks_needed(upto, self._pool.block_size) - len(state.table)
        if missing > 0:
            if not self._make_room(missing, asking):
                self._pool.release(state.table)
                return None
            state.extend(self._pool.allocate(missing))
        self._followed[request.id] = state
        return state

    def register(self, state: Followed, tokens: Sequence[int]) -> None:
        """Register the computed pages that contain only known ``tokens``, so that other requests find them."""
        size, first = self._pool.block_size, state.registered
        whole = min(state.computed, len(tokens)) // size
        if whole <= first:
            return
        some = tokens[first * size : whole * size]
        keys = chained_keys(state.parent, some, size)
        self._pool.register_chain(state.table[first:whole], state.parent, some, keys, first)
        state.parent, state.registered = keys[-1], whole

    def drop(self, request_id: str) -> None:
        """Stop following a request; its registered pages can be found until they are reused."""
        state = self._followed.pop(request_id, None)
        if state is not None:
            self._pool.release(state.table)

    def clear(self) -> None:
        """Stop following all requests."""
        for request_id in tuple(self._followed):
            self.drop(request_id)

    def check(self) -> None:
        """Raise AssertionError if the pages of the followed requests and the pool's references disagree."""
        self._pool.check()
        held = [0] * self._pool.num_blocks
        for state in self._followed.values():
            assert state.row[: len(state.table)].tolist() == state.table, "a table differs from its array"
            for block in state.table:
                held[block] += 1
        assert held == self._pool.references(), "references of pages without a request that holds them"

    def _begin(self, request: Request, tokens: Sequence[int]) -> Followed:
        """Begin to follow a request, starting from cached pages of its prefix."""
        size, root = self._pool.block_size, root_key(request.salt, request.adapter)
        most = len(tokens) - 1
        keys = chained_keys(root, tokens[:most], size)
        shared = self._pool.match(root, keys, tokens, most).blocks
        state = Followed(self._begun, keys[len(shared) - 1] if shared else root, self._width)
        self._begun += 1
        self._pool.share(shared)
        state.extend(shared)
        state.registered = len(shared)
        state.computed = len(shared) * size
        state.known = len(tokens)
        return state

    def _make_room(self, blocks: int, asking: frozenset[str]) -> bool:
        """Release pages of requests that are not ``asking`` until ``blocks`` are free; returns whether they are."""
        if self._pool.num_free < blocks:
            for request_id in [each for each in self._followed if each not in asking]:
                self.drop(request_id)
                if self._pool.num_free >= blocks:
                    break
        return self._pool.num_free >= blocks


def _nobody_listens(event: Event) -> None:
    """Ignores an event: evictions of draft pages are not reported by the engine."""
