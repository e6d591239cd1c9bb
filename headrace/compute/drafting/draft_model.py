"""A proposer that runs a second, small checkpoint: its likeliest tokens are the drafts.

```
 asks ─► followed requests ─► first pass: tokens that are new since the last call, all rows in one batch
                              next passes: one drafted token of each row that is still confident
 rejected drafts are overwritten at the next call; a row that is not caught up yet proposes nothing
```
Drafts are greedy whatever the request's temperature: with the built-in models at temperature 1, the likeliest token of
the draft model is accepted more often (0.79) than a draw by the target's own random number (0.76).
A failure disables drafting with one warning, and requests continue without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.compute.drafting.forward import LEAST_CONFIDENCE, MOST, Decoder, Forward, GuardedProposer, Rows
from headrace.compute.kernels import Drafted
from headrace.compute.model.kv import PagedKV
from headrace.core.block_keys import chained_keys, root_key
from headrace.core.capacity import blocks_needed
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.events import Event
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.request import Request

# The requests that a draft model follows: their computed tokens, and the pages with keys and values.
#
#  tokens     prompt ............ output ... | drafts of the last call
#  computed   [========================][====]            keys and values that exist
#  next call  ...................... a b c x              a, b accepted: they stay; c was computed, x was drawn instead
# A page is registered when all its tokens are known, so requests with equal prefixes share it, and the next turn of a
# chat finds it. The pages are only used for drafting, so all of them can be released at any time.


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

    def reset(self) -> None:
        """Stop following all requests, and forget all pages."""
        self.clear()
        self._pool.reset()

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


CATCH_UP_TOKENS = {"cpu": 256, "cuda": 2048}
"""Total tokens per call for rows that are not caught up, so that a long prompt does not delay a step."""


COLUMNS = 8
"""Block tables are padded to a multiple of this width, so that shapes seldom change."""


class _Line(NamedTuple):
    """A row of a call: the index of its ask, and the number of tokens to compute now."""

    place: int
    state: Followed
    length: int
    most: int  # tokens to propose; 0: it is not caught up after this call


class DraftModel(GuardedProposer):
    """`core.drafting.proposal.CostlyProposer` on a decoder with its own pages.

    Args:
        decoder: the draft model, of the target's vocabulary.
        kv: its pages.
        max_model_len: the longest sequence that it can continue; longer ones get no drafts.
        warn: receives the message when drafting is disabled.
        most: maximum number of tokens to draft for a row, beyond tokens that are sampled but not known yet.
        least_confidence: see `forward.LEAST_CONFIDENCE`.
        catch_up_tokens: see `CATCH_UP_TOKENS`.
    """

    name, label = "draft_model", "draft model"

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        *,
        max_model_len: int,
        warn: Callable[[str], None],
        most: int = MOST,
        least_confidence: float = LEAST_CONFIDENCE,
        catch_up_tokens: int | None = None,
    ) -> None:
        super().__init__(warn)
        self.pages = DraftPages(kv.num_blocks, kv.block_size, max_model_len)
        self._kv = kv
        self._forward = Forward(decoder, kv)
        self._max_model_len = max_model_len
        self._most = most
        self._least_confidence = least_confidence
        self._catch_up_tokens = catch_up_tokens or CATCH_UP_TOKENS[kv.device.type]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Proposer.ended`."""
        self.pages.drop(request.id)

    def clear(self) -> None:
        """See `GuardedProposer.clear`."""
        self.pages.reset()
        self._kv.clear()

    def _release(self) -> None:
        self.pages.clear()

    def _propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        proposals: list[Proposal | None] = [None] * len(draft_rows)
        lines = self._lines(draft_rows)
        if not lines:
            return proposals
        caught_up = [line for line in lines if line.most]
        drafted = self._compute(draft_rows, lines, caught_up)
        for line in lines:
            line.state.computed += line.length
            self.pages.register(line.state, draft_rows[line.place].tokens)
        if drafted is None:
            return proposals
        for at, (line, count) in enumerate(zip(caught_up, drafted.counts.tolist(), strict=True)):
            tokens = tuple(drafted.tokens[at, :count].tolist())
            line.state.computed += int(drafted.computed[at])
            line.state.drafted = tokens
            if tokens:
                confidences = tuple(drafted.probabilities[at, :count].tolist())
                proposals[line.place] = Proposal(tokens, confidences, self.name)
        return proposals

    def _lines(self, draft_rows: Sequence[DraftRow]) -> list[_Line]:
        """The rows to compute, those of one token first."""
        asking = frozenset(draft_row.request.id for draft_row in draft_rows)
        found: list[tuple[int, Followed, int]] = []
        for place, (request, tokens, most, ahead, _) in enumerate(draft_rows):
            # The last draft is never computed here, so its position may be the first one beyond the limit.
            most = min(most, self._most + ahead, self._max_model_len + 1 - len(tokens))
            if most < 1:
                continue
            state = self.pages.find(request, tokens, len(tokens) + most - 1, asking)
            if state is not None:
                found.append((place, state, most))
        lines = []
        left = self._catch_up_tokens
        for place, state, most in sorted(found, key=lambda each: each[1].number):
            behind = state.known - state.computed
            length = behind
            if behind > most + 1:
                length = min(behind, left)
                left -= length
            if length:
                lines.append(_Line(place, state, length, most if length == behind else 0))
        lines.sort(key=lambda line: line.length)
        return lines

    def _compute(
        self, draft_rows: Sequence[DraftRow], lines: Sequence[_Line], caught_up: Sequence[_Line]
    ) -> Drafted | None:
        """Compute the new tokens of ``lines``, and continue those that are ``caught_up``."""
        lengths = np.array([line.length for line in lines], dtype=np.int64)
        tokens: list[int] = []
        for place, state, length, _ in lines:
            tokens += draft_rows[place].tokens[state.computed : state.computed + length]
        width = -(-max(len(line.state.table) for line in lines) // COLUMNS) * COLUMNS
        rows = Rows(
            np.array(tokens, dtype=np.int32),
            np.array([line.state.computed for line in lines], dtype=np.int64),
            lengths,
            np.concatenate([line.state.row[:width] for line in lines]).reshape(len(lines), -1),
        )
        if not caught_up:
            self._forward.compute(rows)
            return None
        wanted = np.cumsum(lengths) - 1
        if len(caught_up) < len(lines):
            wanted = wanted[[line.most > 0 for line in lines]]
        most = np.array([line.most for line in caught_up], dtype=np.int64)
        return self._forward.draft(rows, wanted, most, self._least_confidence)
