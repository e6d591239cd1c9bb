"""One step as values: what the scheduler asks of a runner, and what the runner returns.

```
 StepPlan 7                                   the runner's slots (one per running sequence)
   entries  slot 2 <- tokens, params, blocks    slot 0: tokens a b c d e   table 4 9
   moves    block 9 -> block 12                 slot 1: tokens p q         table 7
   rows     slot 0 [4,5) samples                slot 2: tokens x y z       table 9 12   <- entry
            slot 2 [2,3) samples
            slot 1 [1,4) samples, drafts r s
```
A runner keeps the tokens and the block table of each slot, so a row carries only what is new: its cost does not grow
with the context. A runner appends each sampled token to the slot's tokens itself. This lets the next plan be launched
before the output of this one has been collected (``overlap`` 1). Order within a step: entries, then moves one after
the other, then all rows as one batch.

A row may carry drafts: tokens that a proposer expects to follow the last known one. The row computes their positions
too, and a token is drawn at each of them exactly as it would be without drafts. Drawn tokens count as long as the
draft before them was right: the first wrong draft is replaced by the token drawn at its place, and the rest is void.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from headrace.core.images import ImageSpan
from headrace.core.request import SamplingParams

new_tuple = tuple.__new__
"""Creates a named tuple in half the time of calling its class; used for rows and events, one per token."""


class Tier(StrEnum):
    """Where the KV of a block can be stored, and where recurrent states are: in the slot of a running sequence, or
    saved in the cell of a checkpoint.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"
    SLOT = "slot"
    CHECKPOINT = "checkpoint"

    @property
    def holds_states(self) -> bool:
        """Whether moves from and to it copy recurrent states instead of blocks."""
        return self is Tier.SLOT or self is Tier.CHECKPOINT


class Move(NamedTuple):
    """Copy the keys and values of a whole block, all layers, from ``source`` to ``target``.

    A copy to or from the disk, or from a peer, only starts in its turn; an `Arrival` reports its end. Until then
    neither block takes part in another move.

    Between slots and checkpoints, a move copies the recurrent states of all layers: source and target are the numbers
    of a slot and of a cell. A slot keeps its states when another sequence takes it, until a row or a move replaces
    them, because their checkpoint may be made in the same plan.
    """

    source: int
    target: int
    source_tier: Tier = Tier.DEVICE
    target_tier: Tier = Tier.DEVICE


class Arrival(NamedTuple):
    """A copy to or from disk or peers has ended; ``ok`` is false if the target has not got the source's content."""

    move: Move
    ok: bool
    seconds: float = 0.0


class Entry(NamedTuple):
    """A sequence takes a slot, whose earlier content is forgotten.

    ``tokens`` are all tokens known so far, prompt first (after a preemption the confirmed output too). The first
    ``prompt_tokens`` of them are the prompt, some of whose positions ``images`` fill. ``blocks`` start the slot's
    table: their keys and values exist already (shared prefix) or are filled by this step's moves. ``adapter`` is the
    digest of its adapter, or empty.
    """

    slot: int
    request_id: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    blocks: tuple[int, ...]
    adapter: str = ""
    images: tuple[ImageSpan, ...] = ()


class Placement(NamedTuple):
    """Blocks of window groups take their places in the tables of ``slot``, from place ``first`` on.

    ``parts`` has the blocks of all groups for each place. Places that the window of the slot's rows no longer reaches
    may name any block: they are not read.
    """

    slot: int
    first: int
    parts: tuple[tuple[int, ...], ...]


class Row(NamedTuple):
    """Compute positions ``[start, start + length)`` of the sequence in ``slot``.

    ``new_blocks`` are appended to the slot's table first. If ``samples`` is set, the row reaches the last known
    token, and one further token is sampled from the logits of its last position.

    ``drafts`` are the tokens of the row's last positions, if they are not known but proposed; ``length`` counts them.
    A token is sampled at the last known position and at each of theirs. After a row with drafts, the slot has no other
    row before this step's output is collected.
    """

    slot: int
    start: int
    length: int
    new_blocks: tuple[int, ...]
    samples: bool
    drafts: tuple[int, ...] = ()


class StepPlan(NamedTuple):
    """All work of one step. Decode rows come before prefill rows, and of these the ones with drafts last; a slot has at
    most one row.

    ``ahead`` is for models with recurrent states. It says, by the index of a row, how many of the row's last positions
    the state of its slot stays before. Drafts are among them, so a state never passes a token that may be rejected. The
    next row of the slot begins there, and computes those of these positions again that are known by then.

    ``waits``: nothing can be computed before a copy from the disk arrives. `Runner.collect` waits for one, but only
    briefly, because new requests may arrive. ``idle``: the step is background work, so a runner may interrupt it.

    ``placed`` is for models with groups of window layers: what changes in their tables, in order, before any row.
    """

    step: int
    entries: tuple[Entry, ...]
    moves: tuple[Move, ...]
    rows: tuple[Row, ...]
    waits: bool = False
    idle: bool = False
    ahead: Mapping[int, int] = {}
    placed: tuple[Placement, ...] = ()

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
    """The output of a step; fields are keyed by the index of a row in ``plan.rows``.

    ``tokens[i]`` are the tokens sampled for row ``i`` (empty if the row does not sample): one, and one more for each of
    the row's drafts until the first that is not the token sampled at its place. ``logprobs[i]`` has one
    entry per sampled token. ``prompt_logprobs[i]`` has one entry per computed position ``p``, scoring token ``p + 1``
    of the prompt. ``failures[i]`` says why row ``i`` alone could not be computed; its slot counts as having sampled a
    token, because its next row may be in flight. ``arrivals`` are the copies to and from disk and peers, of this step
    or any before, that have ended since the last output.

    ``broken_off``: a request arrived during an ``idle`` plan after which no other plan was launched, so the plan was
    interrupted. Entries, moves and placements are done, and the blocks of its rows are in the tables. No row has been
    computed: all will be planned again. Recurrent states are what they were before the rows.
    """

    step: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: Mapping[int, tuple[TokenLogprob, ...]] = {}
    prompt_logprobs: Mapping[int, tuple[TokenLogprob, ...]] = {}
    failures: Mapping[int, str] = {}
    arrivals: tuple[Arrival, ...] = ()
    broken_off: bool = False
