"""A runner that returns recorded tokens: those of each request at each position, as fingerprints."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from headrace.core.plan import Row, StepOutput, StepPlan, TokenLogprob
from headrace.lab.replay.trace import Answer
from headrace.observe.recording.fingerprints import SIZE
from headrace.observe.recording.moments import Outcome

NOTHING = Outcome({}, {}, {})
UNKNOWN = 1 << (8 * SIZE)
"""Tokens from here on were generated and never emitted (a stale row): no fingerprint is as large."""

_SCORE = TokenLogprob(0, 0.0, 1, ())


class PlannedRow(NamedTuple):
    """A row with its request; ``prompt_tokens`` is the length of the prompt."""

    request_id: str
    prompt_tokens: int
    row: Row


class RecordedRunner:
    """`core.ports.Runner` over recorded outputs.

    ``outcome`` is what the next collected step returns in addition to its tokens; the driver of the engine sets it.
    ``rows`` are the rows launched last, ``collected`` those whose output was returned last.
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
