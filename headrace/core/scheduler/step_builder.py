"""A step plan while it is being made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter

from headrace.core.events import ChunkReason
from headrace.core.knobs import Knobs
from headrace.core.plan import Entry, Move, Row, StepPlan, new_tuple
from headrace.core.prediction.step_cost import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.sequence import Sequence, Status
from headrace.core.tenancy.classes import ServiceClass
from headrace.core.tenancy.fair_share import TenantAccount

SMOOTH_SECONDS = 0.01
"""What a step that also decodes may take whatever it takes without prompts: nobody reads a hundred tokens a second."""

QUEUE_POWER = 0.25
"""Of the number of prompts, in how much they may add together: with the whole number two or three that meet make all
others wait twice as long; the fourth root keeps as many requests within their SLOs (`benchmarks/scheduling.py`)."""

LEAST_PREFILL = 16
"""Tokens of prefill that fit in a step though its limit in seconds is spent."""

FILL_SECONDS = 0.001
"""What a step that only fills idle time may take: whoever arrives while it runs waits for its end."""

FILL_ENTRANTS = 2
"""Requests that such a step lets in: each takes time that no prediction of its rows knows."""

FILL_STRETCH = 2.0
"""How many times what one row takes it may take all the same: large models' steps are long, however little they do."""


_epoch = attrgetter("epoch")


class StepBuilder:
    """What has been planned so far, and the ``budget`` of tokens that is left.

    ``sequences``, ``lengths`` and ``samples`` are those of the rows, and ``epochs`` the sequences' when the plan was
    made: `Scheduler.commit` goes by them, and knows a row that has become stale in flight.
    """

    __slots__ = (
        "budget",
        "contexts",
        "cost",
        "decode_contexts",
        "decode_seconds",
        "decodes",
        "entries",
        "epochs",
        "fill_seconds",
        "fill_times",
        "fraction",
        "idle",
        "joined",
        "lengths",
        "limit_seconds",
        "moves",
        "now",
        "number",
        "prefill_cost",
        "prompts",
        "row_cost",
        "rows",
        "samples",
        "sequences",
        "times",
        "tokens",
        "tpot_seconds",
        "waits",
    )

    def __init__(
        self, number: int, budget: int, cost: StepCost, now: float = 0.0, idle: bool = False
    ) -> None:
        self.number = number
        self.budget = budget
        self.cost = cost
        self.now = now
        self.idle = idle  # nobody waits for any of it
        self.entries: list[Entry] = []
        self.moves: list[Move] = []
        self.rows: list[Row] = []
        self.waits = False  # nothing to compute, but something is coming from the disk
        self.sequences: list[Sequence] = []
        self.lengths: list[int] = []
        self.samples: list[bool] = []
        self.epochs: tuple[int, ...] = ()
        self.prefill_cost = 0.0
        self.prompts = 0  # sequences that want prefill in this step, running or about to be admitted
        self.joined: dict[str, int] = {}  # prompt tokens of each class that begin in this step
        self.row_cost = 0.0  # each row's part of the step's fixed cost
        self.decodes = 0
        self.decode_contexts = 0
        self.tokens = 0
        self.contexts = 0
        self.tpot_seconds = math.inf  # the tightest wish among those that decode
        self.times: StepTimes | None = None  # where enough has been seen
        self.limit_seconds = math.inf
        self.decode_seconds = 0.0
        self.fraction = 1.0  # of what prefill may take, while a long prompt's part is held back for it
        self.fill_times: StepTimes | None = None  # set where all of the step only fills idle time
        self.fill_seconds = math.inf

    def fill(self, times: StepTimes) -> None:
        """Nobody waits for any of this step: keep it so short, as ``times`` foretell, that nobody has to."""
        self.fill_times = times
        self.fill_seconds = max(FILL_SECONDS, FILL_STRETCH * times.predict(1, 1, 0))

    @property
    def shut(self) -> bool:
        """Whether nobody more may join, however short."""
        return self.budget <= 0 or (self.fill_times is not None and len(self.entries) >= FILL_ENTRANTS)

    def takes_row(self, context: int, contexts: int) -> bool:
        """Whether a step that only fills idle time stays short with one more row that decodes, after ``context``
        positions; the others have ``contexts`` together. The first one it always takes.
        """
        if self.fill_times is None or not self.rows:
            return True
        rows = len(self.rows) + 1
        return self.fill_times.predict(rows, rows, contexts + context) <= self.fill_seconds

    def decode(
        self,
        running: Iterable[Sequence],
        block_size: int,
        grow: Callable[[Sequence, StepBuilder], bool],
    ) -> list[Sequence]:
        """Rows for all that only need their next token; those that need more come back.

        ``grow`` gets one more block for a sequence whose blocks are full, or says that it may not go on; it may preempt
        others. This loop runs once for every token of every answer, so it keeps its sums to itself until its end.
        """
        prefills, rows, sequences, budget = [], self.rows, self.sequences, self.budget
        context_cost, row_cost = 1 / self.cost.context_tokens, 1 + self.row_cost
        contexts, tightest = 0, math.inf
        payer: TenantAccount | None = None
        due = 0.0
        for sequence in running:
            known, planned = len(sequence.tokens) + sequence.pending, sequence.planned
            if known != planned + 1 or known >= sequence.finish_length:
                if known > planned + 1 and sequence.status is Status.RUNNING:
                    prefills.append(sequence)
                continue  # otherwise what is in flight will end it already
            if budget <= 0 or (self.fill_times is not None and not self.takes_row(planned, contexts)):
                continue
            blocks: tuple[int, ...] = ()
            if (
                planned == len(sequence.table) * block_size
            ):  # so with those, too, that had to give theirs back
                if sequence.status is not Status.RUNNING or not grow(sequence, self):
                    continue
                blocks = (sequence.table[-1],)
            rows.append(new_tuple(Row, (sequence.slot, planned, 1, blocks, True)))
            sequences.append(sequence)
            if sequence.account is not payer:
                if payer is not None:
                    payer.charge(due)
                payer, due = sequence.account, 0.0
            due += row_cost + planned * context_cost
            contexts += planned
            budget -= 1
            if sequence.tpot_seconds < tightest:
                tightest = sequence.tpot_seconds
            sequence.planned = known
            sequence.pending += 1
            sequence.last_step = self.number
        if payer is not None:
            payer.charge(due)
        self.budget = budget
        self.decodes = self.tokens = len(rows)
        self.lengths = [1] * self.decodes
        self.samples = [True] * self.decodes
        self.decode_contexts = self.contexts = contexts
        self.tpot_seconds = tightest
        return prefills

    def add_chunk(self, sequence: Sequence, length: int) -> None:
        """A row for the next ``length`` positions of a prompt; its blocks are in its table already."""
        start, end = sequence.planned, sequence.planned + length
        contexts = length * start + length * length // 2
        samples = end == sequence.known
        self.rows.append(Row(sequence.slot, start, length, (), samples))
        self.sequences.append(sequence)
        self.lengths.append(length)
        self.samples.append(samples)
        self.tokens += length
        self.contexts += contexts
        self.budget -= length
        self.prefill_cost += self.cost.rows(length, contexts)
        sequence.account.charge(self.cost.rows(length, contexts) + self.row_cost)
        sequence.planned = end
        sequence.pending += samples
        sequence.last_step = self.number

    def predict(self, times: StepTimes) -> None:
        """All decoding is planned: ``times`` say what prompts add to it."""
        self.times = times
        self.decode_seconds = times.predict(len(self.rows), self.tokens, self.contexts)

    def bound(self, usual_seconds: float, wished_seconds: float) -> None:
        """Bound what has been foreseen of the step with all that follows.

        The ``usual_seconds`` (0: no bound) are for devices on which decoding takes a small part of them; where it takes
        more, prefill may take as long as it. What callers wished for is kept as it is.
        """
        usual = max(usual_seconds, 2 * self.decode_seconds) if usual_seconds else math.inf
        self.limit_seconds = min(usual, wished_seconds)

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
        if self.decodes and self.times is not None and self.limit_seconds < math.inf:
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

        One prompt that wants computing may stretch the step by ``ratio`` of its decoding, several by somewhat more: one
        long prompt hardly disturbs the others, and a queue of prompts is not starved by them, which would empty the
        batch.
        """
        share = ratio * max(1, self.prompts) ** QUEUE_POWER
        if self.times is not None:
            decoding = self.decode_seconds
            end = decoding + self.fraction * max(share * decoding, SMOOTH_SECONDS - decoding)
            length = self.times.longest(start, end, len(self.rows), self.tokens, self.contexts)
        else:
            decoding = self.cost.fixed_tokens + self.cost.rows(self.decodes, self.decode_contexts)
            allowed = self.fraction * share * decoding
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
        self.epochs = tuple(map(_epoch, self.sequences))
        return StepPlan(
            self.number, tuple(self.entries), tuple(self.moves), tuple(self.rows), self.waits, self.idle
        )
