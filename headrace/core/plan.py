"""One step as values: what the scheduler asks of a runner, and what comes back.

```
 StepPlan 7                                   the runner's slots (one per running sequence)
   entries  slot 2 <- tokens, params, blocks    slot 0: tokens a b c d e   table 4 9
   moves    block 9 -> block 12                 slot 1: tokens p q         table 7
   rows     slot 0 [4,5) samples                slot 2: tokens x y z       table 9 12   <- entry
            slot 2 [2,3) samples
```
A runner keeps per slot the tokens and the block table, so a row carries only what is new: its cost does
not grow with the context. A runner appends each token that it draws to the slot's tokens itself; that is
what lets the next plan be launched before this one's output has been collected (``overlap`` 1).
Order within a step: entries, then moves one after the other, then all rows as one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from headrace.core.request import SamplingParams

new_tuple = tuple.__new__
"""Makes a named tuple at half the price of calling its class: for rows and events, of which each token has one."""


class Tier(StrEnum):
    """Where a block of keys and values can lie."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"


class Move(NamedTuple):
    """Copy the keys and values of a whole block, all layers, from ``source`` to ``target``.

    A copy to or from the disk only begins in its turn; when it has ended, an `Arrival` says so. Until then neither end
    takes part in another move.
    """

    source: int
    target: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE


class Arrival(NamedTuple):
    """A copy to or from the disk has ended; ``ok`` is false where the target does not hold what the source held."""

    move: Move
    ok: bool
    seconds: float = 0.0


class Entry(NamedTuple):
    """A sequence takes a slot: whatever the slot held before is forgotten.

    ``tokens`` are all tokens known so far, prompt first (after a preemption the confirmed output too);
    ``prompt_tokens`` of them are the prompt. ``blocks`` start the slot's table: blocks whose keys and values
    exist already (shared prefix) or are filled by this step's moves.
    """

    slot: int
    request_id: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    blocks: tuple[int, ...]


class Row(NamedTuple):
    """Compute positions ``[start, start + length)`` of the sequence in ``slot``.

    ``new_blocks`` are appended to the slot's table first. When ``samples`` is set the row reaches the last
    known token, and one further token is drawn from the logits of its last position.
    """

    slot: int
    start: int
    length: int
    new_blocks: tuple[int, ...]
    samples: bool


class StepPlan(NamedTuple):
    """All work of one step. Rows of decode come before rows of prefill; a slot has at most one row.

    ``waits``: there is nothing to compute before a copy from the disk has arrived; `Runner.collect` waits for one, but
    not for long, since new requests may come. ``idle``: nobody waits for any of it, so a runner may break it off.
    """

    step: int
    entries: tuple[Entry, ...]
    moves: tuple[Move, ...]
    rows: tuple[Row, ...]
    waits: bool = False
    idle: bool = False

    @property
    def has_work(self) -> bool:
        """Whether there is anything to launch."""
        return bool(self.rows or self.moves or self.waits)


class TokenLogprob(NamedTuple):
    """A token's natural-log probability, its rank (1 = likeliest), and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class StepOutput(NamedTuple):
    """What a step produced; every field is keyed by the index of a row in ``plan.rows``.

    ``tokens[i]`` are the tokens drawn for row ``i`` (empty where the row does not sample). ``logprobs[i]``
    has one entry per drawn token. ``prompt_logprobs[i]`` has one entry per computed position ``p``, scoring
    token ``p + 1`` of the prompt. ``failures[i]`` says why row ``i`` alone could not be computed; its slot counts as
    having drawn some token, since its next row may be in flight. ``arrivals`` are the copies to and from the disk, of
    this step or any before, that have ended since the last output.

    ``broken_off``: somebody came during an ``idle`` plan, since whose launch there has been no other. Entries
    and moves are done and its rows' blocks are in the tables, but no row has been computed: all will be planned again.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: Mapping[int, tuple[TokenLogprob, ...]] = {}
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = {}
    failures: Mapping[int, str] = {}
    arrivals: tuple[Arrival, ...] = ()
    broken_off: bool = False
