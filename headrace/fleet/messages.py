"""Messages from rank 0 to the other ranks, as bytes: a kind, then arrays of 32-bit integers.

```
 kind | count of arrays | length of each | values ...
```
A plan's message omits everything that only sampling needs. A row takes 24 bytes, plus 4 for each wanted position and
new block, so the size of a message does not depend on the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from headrace.compute.batch import Ints
from headrace.core.plan import Entry, Move, Row, StepPlan, Tier
from headrace.core.request import SamplingParams

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

_TIERS = tuple(Tier)
_NO_PARAMS = SamplingParams()


class Kind(IntEnum):
    """The kind of a message.

    ``CHECK``, ``LOAD`` and ``ALLOCATE`` contain JSON instead of arrays, ``STEP`` a plan. ``TOKENS`` and ``LOGITS`` are
    followed by a collective transfer: sampled tokens for slots and positions, or states whose logits are needed.
    """

    LOAD = 1
    ALLOCATE = 2
    STEP = 3
    TOKENS = 4
    LOGITS = 5
    CHECK = 6


class Step(NamedTuple):
    """A plan on another rank, the tokens of each entry, and the packed positions whose states are wanted."""

    plan: StepPlan
    tokens: tuple[Ints, ...]
    wanted: Ints


def packed(kind: Kind, *arrays: Sequence[int] | Ints) -> bytes:
    """A message from its arrays."""
    words = [np.asarray(array, dtype=np.int32).reshape(-1) for array in arrays]
    head = np.array([kind, len(words), *map(len, words)], dtype=np.int32)
    return b"".join(word.tobytes() for word in (head, *words))


def unpacked(message: bytes) -> tuple[Kind, list[Words]]:
    """The kind of a message and its arrays."""
    words = np.frombuffer(message, dtype=np.int32)
    count = int(words[1])
    ends = list(accumulate(words[2 : 2 + count].tolist(), initial=2 + count))
    return Kind(int(words[0])), [words[begin:end] for begin, end in pairwise(ends)]


def step_message(plan: StepPlan, tokens: Sequence[Ints], wanted: Ints) -> bytes:
    """A plan as a message; ``tokens`` are those of each entry, as its slot has them."""
    sizes = [
        (each.slot, len(known), len(each.blocks)) for each, known in zip(plan.entries, tokens, strict=True)
    ]
    rows = [
        (row.slot, row.start, row.length, row.samples, len(row.new_blocks), len(row.drafts))
        for row in plan.rows
    ]
    moves = [
        (move.source, move.target, _TIERS.index(move.source_tier), _TIERS.index(move.target_tier))
        for move in plan.moves
    ]
    return packed(
        Kind.STEP,
        list(chain(*sizes)),
        np.concatenate(tokens) if tokens else (),
        list(chain.from_iterable(each.blocks for each in plan.entries)),
        list(chain(*moves)),
        list(chain(*rows)),
        list(chain.from_iterable(row.new_blocks for row in plan.rows)),
        list(chain.from_iterable(row.drafts for row in plan.rows)),
        wanted,
    )


def step_of(arrays: Sequence[Words]) -> Step:
    """The plan of a message. Its entries have no parameters; their tokens are separate."""
    sizes, tokens, entry_blocks, moves, rows, new_blocks, drafts, wanted = arrays
    entries, known = [], []
    token = block = 0
    for slot, count, blocks in sizes.reshape(-1, 3).tolist():
        own = tuple(entry_blocks[block : block + blocks].tolist())
        entries.append(Entry(slot, "", (), 0, _NO_PARAMS, 0, frozenset(), own))
        known.append(tokens[token : token + count].astype(np.int64))
        token, block = token + count, block + blocks
    moved = tuple(
        Move(source, target, _TIERS[source_tier], _TIERS[target_tier])
        for source, target, source_tier, target_tier in moves.reshape(-1, 4).tolist()
    )
    planned = tuple(_rows(rows.reshape(-1, 6).tolist(), new_blocks.tolist(), drafts.tolist()))
    plan = StepPlan(0, tuple(entries), moved, planned)
    return Step(plan, tuple(known), wanted.astype(np.int64))


def _rows(rows: list[list[int]], new_blocks: list[int], drafts: list[int]) -> Iterator[Row]:
    block = draft = 0
    for slot, start, length, samples, blocks, drafted in rows:
        own, guessed = new_blocks[block : block + blocks], drafts[draft : draft + drafted]
        yield Row(slot, start, length, tuple(own), bool(samples), tuple(guessed))
        block, draft = block + blocks, draft + drafted
