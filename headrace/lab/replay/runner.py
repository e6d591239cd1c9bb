"""A runner that returns the recorded tokens (fingerprints) of each request by position."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from headrace.core.plan import Row, StepOutput, StepPlan, TokenLogprob
from headrace.lab.replay.trace import Answer
from headrace.observe.recording.moments import Outcome
from headrace.observe.recording.trace_file import SIZE

NOTHING = Outcome({}, {}, {})
UNKNOWN = 1 << (8 * SIZE)
"""Ids from here on stand for tokens that were generated but never emitted (stale rows); fingerprints are smaller."""

_SCORE = TokenLogprob(0, 0.0, 1, ())


class PlannedRow(NamedTuple):
    """A row with the id and prompt length of its request."""

    request_id: str
    prompt_tokens: int
    row: Row


class RecordedRunner:
    """`core.ports.Runner` over recorded outputs.

    ``outcome`` is what the next `collect` returns in addition to tokens; the replay sets it before each step. ``rows``
    are the rows of the last `launch`, ``collected`` those of the last `collect`.
    """

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.outcome = NOTHING
        self.rows: tuple[PlannedRow, ...] = ()
        self.collected: tuple[PlannedRow, ...] = ()
        self._answers = answers
        self._owners: dict[int, tuple[str, int]] = {}
        self._launched: deque[tuple[StepPlan, tuple[PlannedRow, ...]]] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        for entry in plan.entries:
            self._owners[entry.slot] = (entry.request_id, entry.prompt_tokens)
        self.rows = tuple(PlannedRow(*self._owners[row.slot], row) for row in plan.rows)
        self._launched.append((plan, self.rows))

    def collect(self) -> StepOutput:
        plan, rows = self._launched.popleft()
        if self.outcome.broken_off:
            self.collected = ()
            return StepOutput(plan.step, (), arrivals=self.outcome.arrivals, broken_off=True)
        self.collected = rows
        tokens = tuple(
            self._drawn(each, self.outcome.counts.get(i, 1)) if each.row.samples else ()
            for i, each in enumerate(rows)
        )
        scores = {i: (_SCORE,) * count for i, count in self.outcome.scores.items()}
        return StepOutput(
            plan.step,
            tokens,
            prompt_logprobs=scores,
            failures=self.outcome.failures,
            arrivals=self.outcome.arrivals,
        )

    def _drawn(self, planned: PlannedRow, count: int) -> tuple[int, ...]:
        row = planned.row
        position = row.start + row.length - len(row.drafts) - planned.prompt_tokens
        answer = self._answers.get(planned.request_id, Answer()).tokens[position : position + count]
        return (*answer, *(UNKNOWN + position + i for i in range(len(answer), count)))
