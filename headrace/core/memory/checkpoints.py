"""Checkpoints of recurrent states: saved states at block boundaries, found by the block's key.

```
 slot of a running sequence ──save──> cell (unconfirmed) ──published under key──> idle: hit, or evicted
            ^                                                                      │
            └────────────────────────────── restore ───────────────────────────────┘
```
A layer with a recurrent state keeps one value for each sequence, which stands at the end of what was computed. A prefix
is usable only as far as such a value was saved. A cell holds the states of all layers at one position. Its key is that
of the block that ends there, so it stands for all tokens before it. It is forgotten when no tier has that block any
more: cells stay where they are while blocks move. This file tracks keys and cells; the runner copies the states.

Eviction order: the policy of blocks ranks the cells, but cells that are probably not needed any more come first. A
turn of a chat leaves two checkpoints, at the end of its prompt and at the end of its answer. The next turn needs the
end of the answer if the client returns the answer as it was, and the end of the prompt if it changes the answer, for
example because reasoning is left out. A prompt that is sent again needs the end of the prompt, too. Lookups show how
often each end is needed, also by checkpoints that were evicted recently. The end is evicted first whose loss costs
fewer tokens: without the end of the answer, its tokens are computed again; without that of the prompt, all before it.
Before those come the ends of turns that have been continued, unless a second turn has started there, and the answers
whose prompt was sent again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from headrace.core.events import CheckpointDropped, DropReason, Event, RecomputeReason
from headrace.core.memory.eviction import AGE_SPAN, Block, EvictionOrder, EvictionPolicy, mark

REMEMBERED = 8
"""Keys of evicted checkpoints that are remembered, per cell: for explanations, and to learn which ones are needed."""

LEARNED = 1 / 32
"""Weight of the newest start in the learned share: about the last 32 starts count."""

NOT_NEEDED = int(AGE_SPAN / 10)
"""Age of a cell whose loss costs less than that of the other end of its turn: it is evicted before all others of its
retention. A cell whose turn has been continued is twice as old.
"""


class End(Enum):
    """The place of a checkpoint in its turn of a chat."""

    NONE = auto()
    """Not an end, or the end of a prompt whose answer has no checkpoint."""
    PROMPT = auto()
    """The end of a prompt whose answer has a checkpoint, too."""
    ANSWER = auto()


class Cell(Block):
    """A cell, which is ranked like a block. ``starts`` is how many sequences have started from its content, without
    equal prompts. ``other`` is the key of the checkpoint at the other end of its turn; of several answers, the last.
    """

    __slots__ = ("end", "other", "starts")

    def forget(self) -> None:
        super().forget()
        self.end = End.NONE
        self.starts = 0
        self.other = b""


class Evicted(NamedTuple):
    """What is known of an evicted checkpoint: see `Cell`."""

    end: End
    other: bytes


NEVER_EVICTED = Evicted(End.NONE, b"")


class Checkpoints:
    """The cells of a device. ``interval`` is the number of tokens between checkpoints of a long prompt; 0: none.

    A cell is blank, held by a running sequence until its content is confirmed, or published under its key.
    """

    def __init__(
        self, cells: int, interval: int, eviction: EvictionPolicy, emit: Callable[[Event], None]
    ) -> None:
        self.num_cells = cells
        self.interval = interval
        self._emit = emit
        self._cells: list[Cell] = []  # created on first use
        self._blank: list[int] = []
        self._order = EvictionOrder(eviction)
        self._by_key: dict[bytes, Cell] = {}
        self._announced: dict[bytes, int] = {}
        self._evicted: dict[bytes, Evicted] = {}  # keys evicted for lack of cells, oldest first
        self._from_prompts = 0.0  # share of starts at the end of a prompt, of those at either end
        self._found: Cell | None = None  # of the last lookup: not evicted before it is used

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    # -- lookups -----------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """The last checkpoint of a chain of cached blocks: how many blocks it covers, and its cell; (0, -1): none.

        Its cell is not evicted before the next lookup.
        """
        for count in range(len(keys), 0, -1):
            if (cell := self._by_key.get(keys[count - 1])) is not None:
                self._found = cell
                return count, cell.id
        self._found = None
        return 0, -1

    def reach(self, keys: Sequence[bytes]) -> int:
        """Blocks of a chain up to its last checkpoint that is saved or announced."""
        by_key, announced = self._by_key, self._announced
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in by_key or keys[count - 1] in announced:
                return count
        return 0

    def used(self, key: bytes, *, equal: bool = False) -> None:
        """A sequence starts from the checkpoint of this key; ``equal``: at the last block boundary of its prompt.

        The first one is mostly the next turn of the same chat, which makes a later checkpoint: it counts as no hit.
        """
        cell = self._by_key[key]
        self._found = None
        self._touch(cell)
        self._leave(cell.other)
        if equal and cell.end is End.PROMPT:  # sent again; its next turn may start here, too
            return
        cell.hits += cell.starts > 0
        cell.starts += 1
        if cell.starts == 1 and cell.end is not End.NONE:
            self._put_first(cell, 2)

    def learn(self, keys: Sequence[bytes]) -> None:
        """A sequence starts whose first blocks are those of ``keys``: learn which end of a turn it needs."""
        for key in reversed(keys):
            cell = self._by_key.get(key)
            end = self._evicted[key].end if cell is None and key in self._evicted else cell and cell.end
            if end is not None:
                if end is not End.NONE:
                    self._from_prompts += LEARNED * ((end is End.PROMPT) - self._from_prompts)
                return

    def why_missing(self, keys: Sequence[bytes], covered: int) -> RecomputeReason:
        """Why cached blocks ``keys`` are computed again behind the ``covered`` blocks before them."""
        if any(key in self._evicted for key in keys):
            return RecomputeReason.EVICTED
        return RecomputeReason.BEYOND if covered else RecomputeReason.NO_CHECKPOINT

    # -- announcements -----------------------------------------------------------------------------

    def announce(self, key: bytes) -> None:
        """A running sequence is about to make a checkpoint of this key."""
        self._announced[key] = self._announced.get(key, 0) + 1

    def withdraw(self, key: bytes) -> None:
        """Undo `announce`: the checkpoint is published, or will not be made."""
        count = self._announced.pop(key) - 1
        if count:
            self._announced[key] = count

    def is_announced(self, key: bytes) -> bool:
        return key in self._announced

    # -- cells -------------------------------------------------------------------------------------

    def take(self) -> int | None:
        """A cell for a new checkpoint, after an eviction if necessary; None if there is none to evict."""
        if self._blank:
            return self._blank.pop()
        if len(self._cells) < self.num_cells:
            self._cells.append(Cell(len(self._cells)))
            return len(self._cells) - 1
        return self._evict()

    def _evict(self) -> int | None:
        """Evict the lowest checkpoint, but not the one that a sequence is about to start from."""
        if len(self._order) <= (self._found is not None):
            return None
        lowest = self._order.pop(1)[0]
        if lowest is self._found:
            found, lowest = lowest, self._order.pop(1)[0]
            self._order.add(found, found.due)
        cell = self._cells[lowest.id]
        assert cell.key is not None
        self._evicted[cell.key] = Evicted(cell.end, cell.other)
        while len(self._evicted) > REMEMBERED * self.num_cells:
            del self._evicted[next(iter(self._evicted))]
        self._drop(cell, DropReason.EVICTED)
        return cell.id

    def _drop(self, cell: Cell, reason: DropReason) -> None:
        """Forget a published cell, which is no longer in the order."""
        assert cell.key is not None
        del self._by_key[cell.key]
        if cell is self._found:
            self._found = None
        cell.forget()
        self._emit(CheckpointDropped(reason))

    def publish(self, cell_id: int, key: bytes, chain: int, *, wanted: bool) -> None:
        """A taken cell holds the state behind the block of this key, the ``chain``-th of its sequence."""
        cell = self._cells[cell_id]
        cell.key, cell.chain, cell.wanted = key, chain, wanted
        cell.end, cell.other = self._evicted.pop(key, NEVER_EVICTED)
        self._by_key[key] = cell
        self._order.add(cell)
        if cell.end is not End.NONE:  # a turn that continues there had to compute it again
            cell.starts = 1
            self._put_first(cell, 2)
            self._leave(cell.other)

    def answered(self, prompt_key: bytes, key: bytes) -> None:
        """The end of an answer was published under ``key``; the last whole block of its prompt has ``prompt_key``.

        The one whose loss would cost less is evicted first.
        """
        answer, prompt = self._by_key[key], self._by_key.get(prompt_key)
        answer.end, answer.other = End.ANSWER, prompt_key
        if prompt is not None and prompt.end is not End.ANSWER:
            prompt.end, prompt.other = End.PROMPT, key
        if prompt is not None:
            answer_loss = (1 - self._from_prompts) * (answer.chain - prompt.chain)
            less = prompt if self._from_prompts * prompt.chain < answer_loss else answer
            if not less.starts:
                self._put_first(less, 1)

    def _touch(self, cell: Cell) -> None:
        """A published cell was used."""
        self._order.discard(cell)
        self._order.add(cell)

    def made_again(self, key: bytes) -> None:
        """A sequence has reached the place of a published checkpoint, too, for example with an equal answer."""
        cell = self._by_key.get(key)
        if cell is not None:
            self._touch(cell)

    def _leave(self, key: bytes) -> None:
        """The turn of this end is continued or made again elsewhere."""
        cell = self._by_key.get(key)
        if cell is not None and not cell.starts:
            self._put_first(cell, 2)

    def _put_first(self, cell: Cell, ages: int) -> None:
        """A published cell is probably not needed any more: evict it before others, unless it is used again."""
        cell.used = cell.used % NOT_NEEDED - ages * NOT_NEEDED
        self._order.update((cell,))

    def free(self, cell_id: int) -> None:
        """A taken cell is not needed after all."""
        self._blank.append(cell_id)

    def forget(self, key: bytes, reason: DropReason = DropReason.BLOCK) -> None:
        """No tier has the block of this key any more, so the checkpoint is of no use."""
        cell = self._by_key.get(key)
        if cell is not None:
            self._order.discard(cell)
            self._drop(cell, reason)
            self._blank.append(cell.id)

    def reset(self) -> None:
        """Forget all checkpoints: their content is lost."""
        for key in tuple(self._by_key):
            self.forget(key)

    def supersede(self, key: bytes) -> None:
        """A sequence has made a later checkpoint: forget this one, unless another sequence has started from it."""
        cell = self._by_key.get(key)
        if cell is not None and cell is not self._found and not cell.starts and not cell.wanted:
            self.forget(key, DropReason.SUPERSEDED)

    # -- restart -----------------------------------------------------------------------------------

    def saved(self) -> list[Cell]:
        """The published cells, least recently used first."""
        return sorted(self._by_key.values(), key=lambda cell: cell.used)

    def adopt(self, key: bytes, chain: int) -> int | None:
        """A cell for the checkpoint of an earlier process, whose block some tier has; None if there is none."""
        cell = None if key in self._by_key else self.take()
        if cell is not None:
            self.publish(cell, key, chain, wanted=False)
        return cell

    # -- order and upkeep --------------------------------------------------------------------------

    def mark(self, keys: Sequence[bytes], *, wanted: bool) -> None:
        """A waiting request needs these keys of a chain, or no longer does."""
        mark(self._by_key, self._order, keys, wanted=wanted)

    def keep(self, key: bytes, retention: int, seconds: float | None) -> None:
        """Apply a request's retention priority to the checkpoint of this key, if there is one."""
        if (cell := self._by_key.get(key)) is not None:
            cell.keep(retention, seconds)
            self._touch(cell)

    def retain(self, keys: Iterable[bytes], retention: int) -> None:
        """Set the retention priority of the checkpoints of a chain."""
        cells = [cell for key in keys if (cell := self._by_key.get(key))]
        for cell in cells:
            cell.retention, cell.seconds, cell.due = retention, None, None
        self._order.update(cells)

    def advance(self, now: float) -> None:
        """Set the time, in seconds: retention that has expired falls back to the default."""
        self._order.advance(now)

    def check(
        self,
        cached: Callable[[bytes], bool],
        wanted: Callable[[bytes], bool],
        held: Iterable[int],
        announced: Iterable[bytes],
    ) -> None:
        """Raise AssertionError unless each cell is blank, held or published, and the announcements are those given.

        ``cached`` and ``wanted`` are of the blocks, by key; running sequences hold the cells ``held``.
        """
        published, unpublished = list(self._by_key.values()), [*self._blank, *held]
        ids = sorted([*unpublished, *(cell.id for cell in published)])
        assert ids == list(range(len(self._cells))), "a cell is lost, or has two uses"
        assert len(self._cells) <= self.num_cells, "too many cells"
        assert all(cell.key == key for key, cell in self._by_key.items()), "a key finds another cell"
        assert all(self._cells[i].key is None for i in unpublished), "an unpublished cell has a key"
        assert all(cell in self._order for cell in published), "a checkpoint cannot be evicted"
        assert not any(self._cells[i].starts for i in unpublished), "an unpublished cell was used"
        assert self._found is None or self._found in published, "what was found is not published"
        assert len(self._order) == len(published), "a cell is in the eviction order twice"
        assert all(map(cached, self._by_key)), "a checkpoint has no block"
        assert all(cell.wanted == wanted(key) for key, cell in self._by_key.items()), "wanted differs"
        assert Counter(announced) == Counter(self._announced), "announcements differ from those of sequences"
