"""A step plan while it is being made."""

from __future__ import annotations

from headrace.core.events import ChunkReason
from headrace.core.knobs import Knobs
from headrace.core.plan import Entry, Move, Row, StepPlan
from headrace.core.sequence import Sequence


class Draft:
    """What has been planned so far, and the ``budget`` of tokens that is left.

    ``launched`` names for each row its sequence and the sequence's epoch, so that `Scheduler.commit` knows a row
    that has become stale in flight.
    """

    __slots__ = (
        "budget",
        "decodes",
        "entries",
        "launched",
        "moves",
        "number",
        "planned_slots",
        "prefill_tokens",
        "rows",
    )

    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.budget = budget
        self.entries: list[Entry] = []
        self.moves: list[Move] = []
        self.rows: list[Row] = []
        self.launched: list[tuple[Sequence, int]] = []
        self.planned_slots: set[int] = set()
        self.prefill_tokens = 0
        self.decodes = 0

    def share(self, remaining: int, knobs: Knobs) -> tuple[int, ChunkReason]:
        """How many of the remaining positions of a prefill this step takes, and what bounds them."""
        if not knobs.chunked_prefill:
            return (remaining, ChunkReason.WHOLE) if remaining <= self.budget else (0, ChunkReason.BUDGET)
        length, reason = remaining, ChunkReason.WHOLE
        budget = self.budget
        if self.decodes and knobs.mixed_prefill_tokens:
            budget = min(budget, knobs.mixed_prefill_tokens - self.prefill_tokens)
        if budget < length:
            length, reason = max(0, budget), ChunkReason.BUDGET
        if 0 < knobs.long_prefill_tokens < length:
            length, reason = knobs.long_prefill_tokens, ChunkReason.LONG_PROMPT
        return length, reason

    def freeze(self) -> StepPlan:
        """The plan as a value."""
        return StepPlan(self.number, tuple(self.entries), tuple(self.moves), tuple(self.rows))
