"""Drafts of a step: assigned to rows when it is planned, and settled when it is committed.

When the decode rows of a step are planned, a `Drafter` proposes drafts for all of them in one call. Drafted positions
use only free blocks: a draft is cut instead of preempting a request. The position of a rejected draft is computed again
later, in the same slot of the KV cache.

While a step with drafts is in flight, the number of tokens of its rows is unknown, so the scheduler plans no step until
it has been committed. Steps without drafts overlap as configured. The last tokens of an overlapping sequence are not
known when it is drafted for: its proposal must begin with them, and only the tokens after them are verified.
"""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter, mul

from headrace.core.capacity import blocks_needed
from headrace.core.drafting.proposal import Drafter, DraftRow, Proposal, StepLoad
from headrace.core.events import DraftDeclined, DraftedStep, DraftingFailed, Event, Verified
from headrace.core.plan import new_tuple
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import NO_SETTINGS
from headrace.core.scheduler.running_set import RunningSet
from headrace.core.scheduler.step_builder import DraftTimes, StepBuilder
from headrace.core.sequence import Sequence

DRAFT_SHARE = 0.5
"""Share of a step's remaining budget that drafts may take while prompts wait for it."""

_NEXT_DRAFT_STEP = attrgetter("next_draft_step")


class DraftedRows:
    """The drafts of planned rows; none without ``drafter``. A drafter that raises an error is not called again."""

    def __init__(self, drafter: Drafter | None, running: RunningSet, events: list[Event]) -> None:
        self._drafter = drafter
        self._running = running
        self._events = events
        self.in_flight = 0  # launched steps with drafts
        self._declined: dict[str, str] = {}  # by request: why nothing of its last proposal was verified
        self._accepted = 0  # of the step that is being committed, and what was expected
        self._expected = 0.0
        self._drawn = 0  # accepted drafts of the step that was committed last

    def add(self, step: StepBuilder, times: StepTimes | None) -> None:
        """Give drafts to rows of ``step``, in which all decode rows and no others are planned."""
        if self._drafter is None or self._drafter.idle or not step.rows:
            return
        number = step.number
        if min(map(_NEXT_DRAFT_STEP, step.sequences)) > number:
            return
        due = [row for row, sequence in enumerate(step.sequences) if sequence.next_draft_step <= number]
        budget = int(step.budget * DRAFT_SHARE) if step.prompts else step.budget
        rows, draft_rows = [], []
        for row in due:
            sequence = step.sequences[row]
            tokens, in_flight = sequence.tokens, sequence.pending - 1  # drawn already, but not known
            max_tokens = min(sequence.finish_length - len(tokens) - 1, budget + in_flight)
            if sequence.request.settings is not NO_SETTINGS:
                max_tokens = in_flight + sequence.request.settings.limit_drafted(max_tokens - in_flight)
            if max_tokens > in_flight:
                rows.append(row)
                draft_rows.append(
                    new_tuple(
                        DraftRow, (sequence.request, tokens, max_tokens, in_flight, sequence.tokens_per_step)
                    )
                )
        if not draft_rows:
            return
        if times is not None and not times.residuals.is_measured(len(step.rows)):
            times = None  # steps with drafts can only be judged against measured steps without
        asked = set(rows)
        other_tokens_per_step = tuple(
            [each.tokens_per_step for row, each in enumerate(step.sequences) if row not in asked]
        )
        load = StepLoad(
            len(step.rows), step.tokens, step.contexts, budget, times, number, other_tokens_per_step
        )
        try:
            proposals = self._drafter.draft(draft_rows, load)
            step.draft_seconds = self._drafter.seconds
            for row, draft_row, proposal in zip(rows, draft_rows, proposals, strict=True):
                if proposal is not None and proposal.tokens:
                    budget -= self._add(
                        step, row, proposal, min(draft_row.max_tokens, budget + draft_row.in_flight)
                    )
                    continue
                step.sequences[row].next_draft_step = self._drafter.next_draft_step(draft_row.request)
                if proposal is not None:
                    self._decline(draft_row.request.id, proposal)
        except Exception as error:
            self._fail(error)
        if step.drafts:
            step.put_drafted_last()
            if times is not None:
                seconds = times.verify_times(load.rows, load.contexts, step.tokens - load.tokens)
                step.draft_times = DraftTimes(load.rows, seconds[0], seconds[step.tokens - load.tokens])

    def _add(self, step: StepBuilder, row: int, proposal: Proposal, max_tokens: int) -> int:
        """Add the part of a proposal that may be verified to a row; returns the number of drafted positions."""
        sequence = step.sequences[row]
        first = sequence.pending - 1
        tokens = _before_end(sequence, proposal.tokens[:max_tokens])
        count = self._room(step, row, len(tokens) - first)
        if count <= 0:
            self._decline(sequence.request.id, proposal)
            return 0
        self._declined.pop(sequence.request.id, None)
        cut = proposal
        if count < len(proposal.tokens):
            part = slice(first, first + count)
            cut = proposal._replace(tokens=tokens[part], confidences=proposal.confidences[part])
        tables = self._running.tables
        blocks: tuple[int, ...] = ()
        missing = blocks_needed(_end(step, row) + count, tables.pool.block_size) - len(sequence.table)
        if missing > 0:
            blocks = self._running.extend(sequence, missing)
        step.draft(row, cut, blocks, tables.recurrent)
        tables.planned(sequence)
        return count

    def _room(self, step: StepBuilder, row: int, count: int) -> int:
        """How many of ``count`` further positions of a row have blocks, or can get them without taking the last."""
        sequence, pool = step.sequences[row], self._running.tables.pool
        spare = max(0, pool.num_free - len(self._running))  # every other sequence may need one next
        places = (len(sequence.table) + spare // self._running.tables.blocks_to_grow) * pool.block_size
        end = _end(step, row)
        count = min(count, places - end)
        return count if count > 0 and step.fits(end, count) else 0

    def settle(self, step: StepBuilder, row: int, drawn: tuple[int, ...]) -> int:
        """Settle a row with drafts by its sampled tokens; returns the number of valid computed positions.

        A recurrent state has not passed any draft, so the next row computes the accepted ones again.
        """
        sequence, proposal, accepted = step.sequences[row], step.drafts[row], len(drawn) - 1
        valid = step.planned_positions(row)
        if row in step.ahead:
            sequence.ahead += accepted
        else:
            self._running.advance(sequence, accepted)
            valid += accepted
        sequence.accepted += accepted
        if self._drafter is not None:
            try:
                self._drafter.verified(sequence.request.id, proposal, accepted)
            except Exception as error:
                self._fail(error)
        drafted, expected = len(proposal.tokens), sum(accumulate(proposal.confidences, mul))
        event = (sequence.request.id, proposal.source, drafted, accepted, expected, proposal.cut)
        self._events.append(new_tuple(Verified, event))
        self._accepted += accepted
        self._expected += expected
        return valid

    def stepped(self, step: StepBuilder) -> None:
        """All rows of a step have been settled."""
        if step.draft_times is not None and self._expected:
            rows, without, seconds = step.draft_times
            share = without / rows
            expected, accepted = (rows + self._expected) * share, (rows + self._accepted) * share
            self._events.append(DraftedStep(seconds, accepted, expected))
        self._drawn, self._accepted, self._expected = self._accepted, 0, 0.0

    def observed(self, step: StepBuilder, seconds: float) -> None:
        """Report to the drafter that the step that was settled last took ``seconds``."""
        rows = len(step.rows)
        if self._drafter is not None and step.decodes == rows:
            self._drafter.observed(rows, rows + self._drawn, seconds, bool(step.drafts))

    def _decline(self, request_id: str, proposal: Proposal) -> None:
        if proposal.cut and self._declined.get(request_id) != proposal.cut:
            self._declined[request_id] = proposal.cut
            self._events.append(DraftDeclined(request_id, proposal.source, proposal.cut))

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._declined.pop(sequence.request.id, None)
        if self._drafter is not None:
            try:
                self._drafter.ended(sequence.request, sequence.tokens)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._drafter = None
        self._events.append(DraftingFailed(f"{type(error).__name__}: {error}"))


def _end(step: StepBuilder, row: int) -> int:
    """The position behind the known tokens of a row that has no drafts yet."""
    return step.rows[row].start + step.rows[row].length


def _before_end(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """``tokens`` up to the first that would end the answer: drawn in its place, that one is the last of the answer."""
    if sequence.end_tokens.isdisjoint(tokens):
        return tokens
    return tokens[: next(i for i, token in enumerate(tokens) if token in sequence.end_tokens)]
