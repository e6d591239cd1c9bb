"""The plan of one step while it is being built: rows, token budget and time limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import NamedTuple

from headrace.core.drafting.proposal import Proposal
from headrace.core.events import ChunkReason
from headrace.core.images import ImageSpan, unsplit
from headrace.core.knobs import Knobs
from headrace.core.plan import Entry, Move, Placement, Row, StepPlan, new_tuple
from headrace.core.prediction.step_curve import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.sequence import Sequence, Status
from headrace.core.tenancy.fair_share import TenantAccount
from headrace.core.tenancy.tenants import ServiceClass

SMOOTH_SECONDS = 0.01
"""Duration that a mixed step may always have, even if decoding alone is faster: 100 tokens per second are more than
anyone reads."""

QUEUE_POWER = 0.25  # see docs/decisions/scheduling.md#prompt-chunks-beside-decoding
"""Exponent with which the number of waiting prompts raises the prefill limit of a mixed step. With exponent 1, two or
three prompts at once make all decoding requests wait twice as long. The fourth root keeps as many requests within
their SLOs."""

LONG_PROMPT_SHARE = 0.5
"""Share of a step's prefill that a prompt of several steps gets while other prompts run too."""

LEAST_PREFILL = 16
"""Tokens of prefill that a step takes even if its time limit is already used up."""

BACKGROUND_SECONDS = 0.001  # see docs/decisions/background-work.md#length-of-background-steps
"""Time limit of a step of background work: a request that arrives during the step waits for its end."""

BACKGROUND_ADMISSIONS = 2
"""Requests that a background step admits: each admission takes time that the prediction of rows does not cover."""

BACKGROUND_STRETCH = 2.0
"""A background step may also take this many times the duration of one row: steps of large models are never short."""


Grow = Callable[[Sequence, "StepBuilder"], bool]

_epoch = attrgetter("epoch")


class DraftTimes(NamedTuple):
    """The seconds predicted for a step's decode ``rows``, without and with their drafts."""

    rows: int
    without: float
    with_drafts: float


class StepBuilder:
    """The rows planned so far, and the ``budget`` of tokens that is left.

    ``sequences``, ``lengths`` and ``samples`` belong to the rows. ``epochs`` are those of the sequences when the plan
    was made. `Scheduler.commit` uses them to recognise a row that has become stale in flight. ``drafts`` are what rows
    verify, by row; lengths count their positions. ``ahead`` is that of the plan.
    """

    __slots__ = (
        "ahead",
        "background_seconds",
        "background_times",
        "budget",
        "contexts",
        "cost",
        "decode_contexts",
        "decode_seconds",
        "decodes",
        "draft_seconds",
        "draft_times",
        "drafts",
        "entries",
        "epochs",
        "fraction",
        "idle",
        "joined",
        "lengths",
        "limit_seconds",
        "moves",
        "now",
        "number",
        "placed",
        "prefill_cost",
        "prompts",
        "row_cost",
        "rows",
        "samples",
        "sequences",
        "spent_seconds",
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
        self.idle = idle  # background work only
        self.entries: list[Entry] = []
        self.moves: list[Move] = []
        self.placed: list[Placement] = []
        self.rows: list[Row] = []
        self.waits = False  # nothing to compute before a copy from the disk arrives
        self.sequences: list[Sequence] = []
        self.lengths: list[int] = []
        self.samples: list[bool] = []
        self.drafts: dict[int, Proposal] = {}
        self.ahead: dict[int, int] = {}
        self.draft_times: DraftTimes | None = None
        self.draft_seconds: Mapping[str, float] = {}  # spent in proposers, by request
        self.epochs: tuple[int, ...] = ()
        self.prefill_cost = 0.0
        self.prompts = 0  # sequences that need prefill in this step, running or about to be admitted
        self.joined: dict[str, int] = {}  # prompt tokens of each class admitted in this step
        self.row_cost = 0.0  # each row's part of the step's fixed cost
        self.decodes = 0
        self.decode_contexts = 0
        self.tokens = 0
        self.contexts = 0
        self.tpot_seconds = math.inf  # the lowest TPOT target among decoding sequences
        self.times: StepTimes | None = None  # set when enough steps have been observed
        self.limit_seconds = math.inf
        self.decode_seconds = 0.0
        self.spent_seconds = 0.0  # by other work, of the prefill time, or left free for its delay
        self.fraction = 1.0  # share of prefill available while a long prompt's part is reserved
        self.background_times: StepTimes | None = None  # set for a step of background work
        self.background_seconds = math.inf

    def limit_background(self, times: StepTimes) -> None:
        """Make this a step of background work: by ``times`` so short that an arriving request hardly waits."""
        self.background_times = times
        self.background_seconds = max(BACKGROUND_SECONDS, BACKGROUND_STRETCH * times.curve.seconds(1))

    @property
    def closed(self) -> bool:
        """Whether no further request may join, however short."""
        return self.budget <= 0 or (
            self.background_times is not None and len(self.entries) >= BACKGROUND_ADMISSIONS
        )

    def fits_row(self, context: int, contexts: int) -> bool:
        """Whether a background step stays short with one more decode row after ``context`` positions.

        ``contexts`` is the sum over the other rows. The first row always fits.
        """
        if self.background_times is None or not self.rows:
            return True
        rows = len(self.rows) + 1
        return self.background_times.curve.seconds(rows, contexts + context) <= self.background_seconds

    def decode(
        self,
        running: Iterable[Sequence],
        block_size: int,
        grow: Grow,
        behind: list[Sequence],
    ) -> list[Sequence]:
        """Plan a row for each sequence that needs only its next token; return those that need prefill.

        Those that need only their next token, but whose recurrent state stands before known ones, are added to
        ``behind``.

        ``grow`` gets one more block for a sequence whose blocks are full, or reports that it cannot continue; it may
        preempt other sequences. This loop runs once per generated token, so it keeps its sums in local variables.
        """
        prefills: list[Sequence] = []
        rows, sequences, budget = self.rows, self.sequences, self.budget
        context_cost, row_cost = 1 / self.cost.context_tokens, 1 + self.row_cost
        contexts, tightest = 0, math.inf
        payer: TenantAccount | None = None
        due = 0.0
        for sequence in running:
            known, planned = len(sequence.tokens) + sequence.pending, sequence.planned
            if known != planned + 1 or known >= sequence.finish_length:
                if known > planned + 1 and sequence.status is Status.RUNNING:
                    (behind if sequence.ahead else prefills).append(sequence)
                continue  # tokens in flight will end it
            if budget <= 0 or (self.background_times is not None and not self.fits_row(planned, contexts)):
                continue
            blocks: tuple[int, ...] = ()
            if (
                planned == len(sequence.table) * block_size
            ):  # also true if it was preempted: then its table is empty
                if sequence.status is not Status.RUNNING or not grow(sequence, self):
                    continue
                blocks = (sequence.table[-1],)
            rows.append(new_tuple(Row, (sequence.slot, planned, 1, blocks, True, ())))
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

    def catch_up(self, sequence: Sequence, blocks: tuple[int, ...], ahead: int) -> None:
        """Add a decode row that begins at the recurrent state, and leaves it ``ahead`` positions before its end."""
        start, known = sequence.planned, sequence.known
        length, contexts = known - start, _contexts(start, known - start)
        if ahead:
            self.ahead[len(self.rows)] = ahead
        self.rows.append(Row(sequence.slot, start, length, blocks, True))
        self.sequences.append(sequence)
        self.lengths.append(length)
        self.samples.append(True)
        self.decodes += 1
        self.tokens += length
        self.contexts += contexts
        self.decode_contexts += contexts
        self.budget -= length
        self.tpot_seconds = min(self.tpot_seconds, sequence.tpot_seconds)
        sequence.account.charge(self.cost.rows(length, contexts) + self.row_cost)
        sequence.planned, sequence.ahead = known - ahead, ahead
        sequence.pending += 1
        sequence.last_step = self.number

    def fits(self, start: int, count: int) -> bool:
        """Whether a background step stays short with ``count`` positions more from ``start`` on."""
        if self.background_times is None:
            return True
        contexts = self.contexts + _contexts(start, count)
        seconds = self.background_times.curve.seconds(self.tokens + count, contexts)
        return seconds <= self.background_seconds

    def draft(self, row: int, proposal: Proposal, blocks: tuple[int, ...], recurrent: bool) -> None:
        """A row verifies ``proposal``, with these ``blocks`` more: count and charge its positions.

        The state of a ``recurrent`` model does not pass them.
        """
        slot, start, length, before, *_ = self.rows[row]
        count = len(proposal.tokens)
        contexts = _contexts(start + length, count)
        self.rows[row] = new_tuple(Row, (slot, start, length + count, before + blocks, True, proposal.tokens))
        self.drafts[row] = proposal
        if recurrent:
            self.ahead[row] = self.ahead.get(row, 0) + count
        self.lengths[row] += count
        self.tokens += count
        self.contexts += contexts
        self.budget -= count
        self.sequences[row].account.charge(self.cost.rows(count, contexts))

    def put_drafted_last(self) -> None:
        """Order the decode rows: those of one token first, because kernels compute them together."""
        order = sorted(range(len(self.rows)), key=self.drafts.__contains__)
        self.ahead = {place: self.ahead[row] for place, row in enumerate(order) if row in self.ahead}
        self.rows = [self.rows[row] for row in order]
        self.sequences = [self.sequences[row] for row in order]
        self.lengths = [self.lengths[row] for row in order]
        first = len(order) - len(self.drafts)
        self.drafts = {first + i: self.drafts[row] for i, row in enumerate(order[first:])}

    def add_chunk(self, sequence: Sequence, length: int, ahead: int = 0) -> None:
        """Add a row for the next ``length`` positions of a prompt; its blocks are in its table already."""
        start, end = sequence.planned, sequence.planned + length
        contexts = length * start + length * length // 2
        samples = end == sequence.known
        if ahead:
            self.ahead[len(self.rows)] = ahead
        self.rows.append(Row(sequence.slot, start, length, (), samples))
        self.sequences.append(sequence)
        self.lengths.append(length)
        self.samples.append(samples)
        self.tokens += length
        self.contexts += contexts
        self.budget -= length
        self.prefill_cost += self.cost.rows(length, contexts)
        sequence.account.charge(self.cost.rows(length, contexts) + self.row_cost)
        sequence.planned, sequence.ahead = end - ahead, ahead
        sequence.pending += samples
        sequence.last_step = self.number

    def predict(self, times: StepTimes) -> None:
        """All decode rows are planned: predict their duration with ``times``."""
        self.times = times
        self.decode_seconds = times.curve.seconds(self.tokens, self.contexts)

    def bound(self, usual_seconds: float, target_seconds: float) -> None:
        """Bound the predicted duration of the step, including the prefill rows that follow.

        ``usual_seconds`` is as in `usual_limit`. ``target_seconds``, from the TPOT targets, is never exceeded.
        """
        self.limit_seconds = min(usual_limit(usual_seconds, self.decode_seconds), target_seconds)

    def share(
        self,
        start: int,
        remaining: int,
        knobs: Knobs,
        may_slow_decoding: bool = False,
        images: tuple[ImageSpan, ...] = (),
    ) -> tuple[int, ChunkReason]:
        """How many of the remaining positions of a prefill from ``start`` this step computes, and what bounds them.

        ``may_slow_decoding``: the decoding tenants have received more service, so this prompt may slow them down.
        Joint positions of ``images`` are not split; the first prompt of a step may exceed the budget for them.
        """
        if not knobs.chunked_prefill:
            return (remaining, ChunkReason.WHOLE) if remaining <= self.budget else (0, ChunkReason.BUDGET)
        length, reason = remaining, ChunkReason.WHOLE
        budget = self.budget
        if self.fraction < 1.0:
            budget -= int(knobs.batched_tokens * (1.0 - self.fraction))
        if self.decodes and knobs.mixed_prefill_ratio and not may_slow_decoding:
            budget = min(budget, self._mixed_budget(start, knobs.mixed_prefill_ratio))
        if self.decodes and self.times is not None and self.limit_seconds < math.inf:
            budget = min(budget, self._timed_budget(start, self.times))
        if self.background_times is not None:
            budget = min(budget, self._background_budget(start, self.background_times))
        if budget < length:
            length, reason = max(0, budget), ChunkReason.BUDGET
        if 0 < knobs.long_prefill_tokens < length:
            length, reason = knobs.long_prefill_tokens, ChunkReason.LONG_PROMPT
        if images and length:
            length = unsplit(images, start, length, self.budget if self.prefill_cost else remaining)
        return length, reason

    def _mixed_budget(self, start: int, ratio: float) -> int:
        """Tokens of prefill from ``start`` that this step computes together with its decode rows; at least one in all.

        One prompt may stretch the step by ``ratio`` of its decoding time, several prompts by somewhat more. One long
        prompt hardly disturbs decoding, and a queue of prompts is not starved, which would empty the batch.
        """
        if self.times is not None:
            end = mixed_limit(self.decode_seconds, ratio, self.prompts, self.fraction) - self.spent_seconds
            length = self.times.curve.longest(start, end, self.tokens, self.contexts)
        else:
            decoding = self.cost.fixed_tokens + self.cost.rows(self.decodes, self.decode_contexts)
            allowed = self.fraction * mixed_share(ratio, self.prompts) * decoding
            length = self.cost.longest(start, max(0.0, allowed - self.prefill_cost))
        return length or int(self.prefill_cost == 0)

    def _timed_budget(self, start: int, times: StepTimes) -> int:
        """Tokens of prefill from ``start`` that keep the step within its limit.

        At least `LEAST_PREFILL` in all; otherwise decoding sequences could starve all prompts.
        """
        room = self.fraction * max(0.0, self.limit_seconds - self.decode_seconds - self.spent_seconds)
        length = times.curve.longest(start, self.decode_seconds + room, self.tokens, self.contexts)
        return max(length, LEAST_PREFILL if self.prefill_cost == 0 else 0)

    def _background_budget(self, start: int, times: StepTimes) -> int:
        """Tokens of prefill from ``start`` that keep a background step short; `LEAST_PREFILL` if it is empty."""
        length = times.curve.longest(start, self.background_seconds, self.tokens, self.contexts)
        return length if self.rows else max(length, LEAST_PREFILL)

    def may_join(self, terms: ServiceClass, length: int) -> bool:
        """Whether a prompt of this class may join with ``length`` tokens; the first one of a step always may."""
        joined = self.joined.get(terms.name, 0)
        if terms.prompt_tokens and joined and joined + length > terms.prompt_tokens:
            return False
        self.joined[terms.name] = joined + length
        return True

    def planned_positions(self, row: int) -> int:
        """By how many positions a row moves its sequence on: not drafts, nor those that its state stays before."""
        if row in self.ahead:
            return self.lengths[row] - self.ahead[row]
        return self.lengths[row] - (len(self.drafts[row].tokens) if row in self.drafts else 0)

    @property
    def all_planned_positions(self) -> int:
        """The sum of `planned_positions` over all rows."""
        odd = self.ahead.keys() | self.drafts.keys()
        return self.tokens - sum(self.lengths[row] - self.planned_positions(row) for row in odd)

    def freeze(self) -> StepPlan:
        """The plan as a value."""
        self.epochs = tuple(map(_epoch, self.sequences))
        return StepPlan(
            self.number,
            tuple(self.entries),
            tuple(self.moves),
            tuple(self.rows),
            self.waits,
            self.idle,
            self.ahead,
            tuple(self.placed),
        )


def mixed_share(ratio: float, prompts: int) -> float:
    """Time that prefill may add to a decoding step, as a share of it, while ``prompts`` prompts wait or run."""
    share: float = ratio * max(1, prompts) ** QUEUE_POWER
    return share


def mixed_limit(decoding: float, ratio: float, prompts: int, fraction: float = 1.0) -> float:
    """Longest predicted time of a step that decodes for ``decoding`` seconds, by the mixed prefill ``ratio``."""
    return decoding + fraction * max(mixed_share(ratio, prompts) * decoding, SMOOTH_SECONDS - decoding)


def usual_limit(usual_seconds: float, decoding: float) -> float:
    """Longest predicted time of a step that decodes for ``decoding`` seconds, by the bound of step times (0: none).

    The bound is meant for devices on which decoding takes a small part of it. Where decoding takes more, prefill may
    take as long as decoding.
    """
    return max(usual_seconds, 2 * decoding) if usual_seconds else math.inf


def _contexts(start: int, count: int) -> int:
    """The sum of the positions that ``count`` positions from ``start`` on attend to, as decode rows count them."""
    return count * start + count * (count - 1) // 2
