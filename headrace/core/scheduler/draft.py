"""A step plan while it is being made."""

from __future__ import annotations

import math

from headrace.core.classes import ServiceClass
from headrace.core.cost import StepCost, StepTimes
from headrace.core.events import ChunkReason
from headrace.core.knobs import Knobs
from headrace.core.plan import Entry, Move, Row, StepPlan
from headrace.core.sequence import Sequence

LEAST_PREFILL = 16
"""Tokens of prefill that fit in a step though its limit in seconds is spent."""

FILL_SECONDS = 0.002
"""What a step that only fills idle time may take: whoever arrives while it runs waits for its end."""

FILL_STRETCH = 2.0
"""How many times what one row takes it may take all the same: large models' steps are long, however little they do."""


class Draft:
    """What has been planned so far, and the ``budget`` of tokens that is left.

    ``launched`` names for each row its sequence and the sequence's epoch, so that `Scheduler.commit` knows a row
    that has become stale in flight.
    """

    __slots__ = (
        "budget",
        "contexts",
        "cost",
        "decode_contexts",
        "decode_seconds",
        "decodes",
        "entries",
        "fill_seconds",
        "fill_times",
        "fraction",
        "joined",
        "launched",
        "limit_seconds",
        "moves",
        "now",
        "number",
        "prefill_cost",
        "prompts",
        "row_cost",
        "rows",
        "times",
        "tokens",
        "tpot_seconds",
        "waits",
    )

    def __init__(self, number: int, budget: int, cost: StepCost, now: float = 0.0) -> None:
        self.number = number
        self.budget = budget
        self.cost = cost
        self.now = now
        self.entries: list[Entry] = []
        self.moves: list[Move] = []
        self.rows: list[Row] = []
        self.waits = False  # nothing to compute, but something is coming from the disk
        self.launched: list[tuple[Sequence, int]] = []
        self.prefill_cost = 0.0
        self.prompts = 0  # sequences that want prefill in this step, running or about to be admitted
        self.joined: dict[str, int] = {}  # prompt tokens of each class that begin in this step
        self.row_cost = 0.0  # each row's part of the step's fixed cost
        self.decodes = 0
        self.decode_contexts = 0
        self.tokens = 0
        self.contexts = 0
        self.tpot_seconds = math.inf  # the tightest wish among those that decode
        self.times: StepTimes | None = None  # set where the step is bounded in seconds
        self.limit_seconds = math.inf
        self.decode_seconds = 0.0
        self.fraction = 1.0  # of what prefill may take, while a long prompt's part is held back for it
        self.fill_times: StepTimes | None = None  # set where all of the step only fills idle time
        self.fill_seconds = math.inf

    def fill(self, times: StepTimes) -> None:
        """Nobody waits for any of this step: keep it so short, as ``times`` foretell, that nobody has to."""
        self.fill_times = times
        self.fill_seconds = max(FILL_SECONDS, FILL_STRETCH * times.predict(1, 1, 0))

    def takes_row(self, context: int) -> bool:
        """Whether there is room for one more row that decodes, after ``context`` positions; always for the first."""
        if self.fill_times is None or not self.rows:
            return self.budget > 0
        seconds = self.fill_times.predict(len(self.rows) + 1, self.tokens + 1, self.contexts + context)
        return self.budget > 0 and seconds <= self.fill_seconds

    def bound(self, times: StepTimes, usual_seconds: float, wished_seconds: float) -> None:
        """All decoding is planned: bound what ``times`` foretell of the step with all that follows.

        The ``usual_seconds`` (0: no bound) are for devices on which decoding takes a small part of them; where it takes
        more, prefill may take as long as it. What callers wished for is kept as it is.
        """
        self.decode_seconds = times.predict(len(self.rows), self.tokens, self.contexts)
        usual = max(usual_seconds, 2 * self.decode_seconds) if usual_seconds else math.inf
        self.limit_seconds = min(usual, wished_seconds)
        self.times = times if self.limit_seconds < math.inf else None

    def share(self, start: int, remaining: int, knobs: Knobs, hurry: bool = False) -> tuple[int, ChunkReason]:
        """How many of the remaining positions of a prefill from ``start`` this step takes, and what bounds them.

        ``hurry``: those who decode have been served more, and may be slowed down for it.
        """
        if not knobs.chunked_prefill:
            return (remaining, ChunkReason.WHOLE) if remaining <= self.budget else (0, ChunkReason.BUDGET)
        length, reason = remaining, ChunkReason.WHOLE
        budget = self.budget
        if self.fraction < 1.0:
            budget -= int(knobs.batched_tokens * (1.0 - self.fraction))
        if self.decodes and knobs.mixed_prefill_ratio and not hurry:
            budget = min(budget, self._beside_decoding(start, knobs.mixed_prefill_ratio))
        if self.decodes and self.times is not None:
            budget = min(budget, self._in_time(start, self.times))
        if self.fill_times is not None:
            budget = min(budget, self._in_idle_time(start, self.fill_times))
        if budget < length:
            length, reason = max(0, budget), ChunkReason.BUDGET
        if 0 < knobs.long_prefill_tokens < length:
            length, reason = knobs.long_prefill_tokens, ChunkReason.LONG_PROMPT
        return length, reason

    def _beside_decoding(self, start: int, ratio: float) -> int:
        """Tokens of prefill from ``start`` that this step takes beside its decoding; at least one in all.

        Each prompt that wants computing may stretch the step by ``ratio`` of its decoding: one long prompt hardly
        disturbs the others, and a queue of prompts is not starved by them, which would empty the batch.
        """
        decoding = self.cost.fixed_tokens + self.cost.rows(self.decodes, self.decode_contexts)
        allowed = self.fraction * ratio * max(1, self.prompts) * decoding
        length = self.cost.longest(start, max(0.0, allowed - self.prefill_cost))
        return length or int(self.prefill_cost == 0)

    def _in_time(self, start: int, times: StepTimes) -> int:
        """Tokens of prefill from ``start`` that keep the step within its limit; `LEAST_PREFILL` in all at least, or
        those who decode would shut out all others for good."""
        room = self.fraction * max(0.0, self.limit_seconds - self.decode_seconds)
        length = times.longest(start, self.decode_seconds + room, len(self.rows), self.tokens, self.contexts)
        return max(length, LEAST_PREFILL if self.prefill_cost == 0 else 0)

    def _in_idle_time(self, start: int, times: StepTimes) -> int:
        """Tokens of prefill from ``start`` for which a step that only fills idle time stays short; never none of it."""
        length = times.longest(start, self.fill_seconds, len(self.rows), self.tokens, self.contexts)
        return length if self.rows else max(length, LEAST_PREFILL)

    def may_join(self, terms: ServiceClass, length: int) -> bool:
        """Whether a prompt of this class may begin with so many tokens; the first one of a step always may."""
        joined = self.joined.get(terms.name, 0)
        if terms.prompt_tokens and joined and joined + length > terms.prompt_tokens:
            return False
        self.joined[terms.name] = joined + length
        return True

    def freeze(self) -> StepPlan:
        """The plan as a value."""
        return StepPlan(self.number, tuple(self.entries), tuple(self.moves), tuple(self.rows), self.waits)
