"""A runner that returns recorded tokens in virtual time, with predicted times for steps and copies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from headrace.core.plan import Arrival, Move, StepOutput, StepPlan, Tier
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import FinishReason
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.lab.replay.runner import PlannedRow, RecordedRunner
from headrace.lab.replay.trace import Answer
from headrace.observe.recording.moments import Outcome


class TimedRunner(RecordedRunner):
    """Steps take the time that ``times`` predicts; copies to and from the disk take ``disk_seconds`` each, in sequence.

    ``time`` is the end of the last collected step. A request that failed fails again after the same number of tokens.
    Drafts are verified against the recorded output. The drafting time of ``drafts`` is added to the step.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer],
        times: StepTimes,
        disk_seconds: float,
        drafts: ForcedAcceptance | None = None,
    ) -> None:
        super().__init__(answers)
        self._drafts = drafts
        self._drafting = 0.0  # drafting seconds that steps already include
        self.time = -math.inf
        self.busy_seconds = 0.0
        self._times = times
        self._disk_seconds = disk_seconds
        self._device_free_at = self._disk_free_at = -math.inf
        self._steps: deque[tuple[float, bool, tuple[PlannedRow, ...]]] = deque()  # end, waits, rows
        self._copies: deque[tuple[float, Move]] = deque()

    def launch(self, plan: StepPlan, now: float) -> None:
        super().launch(plan, now)
        seconds = self._times.predict(*sizes(self.rows)) if plan.rows else 0.0
        if self._drafts is not None:
            seconds += self._drafts.seconds - self._drafting
            self._drafting = self._drafts.seconds
        self.busy_seconds += seconds
        self._device_free_at = max(self._device_free_at, now) + seconds
        self._steps.append((self._device_free_at, plan.waits, self.rows))
        for move in plan.moves:
            if Tier.DISK in (move.source_tier, move.target_tier):
                self._disk_free_at = max(self._disk_free_at, now) + self._disk_seconds
                self._copies.append((self._disk_free_at, move))

    def collect(self) -> StepOutput:
        end, waits, rows = self._steps.popleft()
        if waits and self._copies:
            end = max(end, self._copies[0][0])
        self.time = end
        arrivals = []
        while self._copies and self._copies[0][0] <= end:
            arrivals.append(Arrival(self._copies.popleft()[1], True, self._disk_seconds))
        self.outcome = Outcome({}, {}, self._failing(rows), tuple(arrivals))
        return super().collect()

    def _drawn(self, planned: PlannedRow, count: int) -> tuple[int, ...]:
        drafts, answer = planned.row.drafts, super()._drawn(planned, 1 + len(planned.row.drafts))
        for right, (draft, token) in enumerate(zip(drafts, answer, strict=False)):
            if draft != token:
                return answer[: right + 1]
        return answer

    def _failing(self, rows: tuple[PlannedRow, ...]) -> dict[int, str]:
        failing = {}
        for i, each in enumerate(rows):
            answer = self._answers.get(each.request_id)
            if answer is not None and answer.reason is FinishReason.FAILED and each.row.samples:
                drawn = each.row.start + each.row.length - len(each.row.drafts) - each.prompt_tokens
                if drawn >= len(answer.tokens):
                    failing[i] = answer.message
        return failing


def sizes(rows: tuple[PlannedRow, ...]) -> tuple[int, int, int]:
    """Number of rows, number of tokens, and the sum over the tokens of the positions that each attends to."""
    planned = [each.row for each in rows]
    tokens = sum(row.length for row in planned)
    contexts = sum(row.length * row.start + row.length * (row.length + 1) // 2 for row in planned)
    return len(planned), tokens, contexts
