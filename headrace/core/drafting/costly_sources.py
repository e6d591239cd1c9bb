"""When to call a proposer whose proposals take time on the device, for which rows, and for how many tokens.

```
 without it      rows + free drafts              tokens a step, in its predicted time
 with k tokens   rows + free drafts + more(k)    in that time + k * share * time of a step + verification
```
The proposer is called for the ``k`` that makes the second ratio largest, if that is larger than the first. Otherwise it
is called for a few tokens now and then, so that the acceptance rate and the costs stay known. These probes take at most
`PROBE_SHARE` of the time. They come in bursts at successive steps, because the first call after a pause is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import MARGIN
from headrace.core.drafting.proposal import CostlyProposer, DraftRow, StepLoad
from headrace.core.prediction.step_times import StepTimes

PROBE_SHARE = 0.01  # see docs/decisions/speculative-decoding.md#probes-of-a-draft-model
"""Share of the device's time for probes: proposals made only to measure acceptance rate and cost."""

INITIAL_PROBES, INITIAL_PROBE_SHARE = 48, 0.2
"""Number of first probes that may take a larger share, because no costs are known yet; and that share."""

PROBE_TOKENS, PROBE_BURST = 3, 4
"""Tokens of a probe, and number of probes at successive steps."""

INITIAL_CONFIDENCE, CONFIDENCE_WINDOW = 0.75, 32
"""Assumed mean confidence before the first proposal, and the number of tokens over which it is averaged."""

MAX_PROPOSAL = 16
"""Maximum length of a proposal in tokens."""

COST_WINDOW = 8
"""Number of proposals over which their cost is averaged."""

MAX_COST_RATIO = 3.0
"""A cost above this multiple of the mean counts as this multiple."""


class CostlySource:
    """A proposer with the learned cost of its proposals.

    ``share`` is the time of drafting one token for some rows, as a share of the target's time for a step of these rows.
    The given value is only the first estimate.
    """

    def __init__(self, proposer: CostlyProposer, share: float, acceptance: Acceptance) -> None:
        self.proposer = proposer
        self._cost_share = share
        self._acceptance = acceptance
        self._mean_confidence = INITIAL_CONFIDENCE
        self._probe_credit = 0.0  # seconds for probes
        self._probes = 0
        self._burst_left = 0  # probes that follow at the next steps
        self._probed_request = ""
        self._warm = False  # whether it was called at the step before
        self._backoff = 0
        self._considered: int | None = None  # the last step at which a call was considered
        self.backoff_until = 0
        """The first step at which a call is considered again."""
        self.probing = False
        """Whether the last call was a probe: its tokens are verified even if they do not seem to pay."""

    def choose(
        self,
        draft_rows: Sequence[DraftRow],
        expected: Sequence[float],
        load: StepLoad,
        fixed: int | None,
        max_backoff: int,
    ) -> list[int]:
        """The number of tokens to request for each row; ``expected`` are the tokens expected from other proposals.

        If a call does not pay, the next one is considered after a backoff of at most ``max_backoff`` steps.
        """
        if fixed is not None:
            return [
                0 if expected[row] else draft_row.in_flight + fixed
                for row, draft_row in enumerate(draft_rows)
            ]
        times, self.probing = load.times, False
        if times is None or load.step < self.backoff_until:
            return [0] * len(draft_rows)
        passed = 1 if self._considered is None else load.step - self._considered
        self._considered = load.step
        self._warm = self._warm and passed == 1
        gains = [self._expected_gains(draft_row) for draft_row in draft_rows]
        rows = [row for row, each in enumerate(gains) if each[-1:] > [expected[row]]]
        count = self._best(draft_rows, expected, load, times, gains, rows)
        chosen = [0] * len(draft_rows)
        if count:
            self._backoff = 0
            for row in rows:
                chosen[row] = draft_rows[row].in_flight + count
            return chosen
        probed = self._probe(draft_rows, load, times, passed)
        if probed is not None:
            chosen[probed] = draft_rows[probed].in_flight + PROBE_TOKENS
            self.probing = True
        if not self._burst_left:
            self._backoff = min(max_backoff, 2 * self._backoff + 1)
            self.backoff_until = load.step + 1 + self._backoff
        return chosen

    def observe_confidences(self, confidences: Sequence[float]) -> None:
        """Observe the confidences of a proposal."""
        rate = min(1.0, len(confidences) / CONFIDENCE_WINDOW)
        self._mean_confidence += (sum(confidences) / len(confidences) - self._mean_confidence) * rate

    def observe_cost(self, draft_rows: Sequence[DraftRow], seconds: float, times: StepTimes | None) -> None:
        """Observe that proposals for ``draft_rows`` (at least one) took ``seconds``, which no step time includes."""
        warm, self._warm = self._warm, True
        if times is None:
            return
        times.exclude(seconds)
        rows, contexts = len(draft_rows), sum(len(draft_row.tokens) for draft_row in draft_rows)
        unit = max(draft_row.max_tokens for draft_row in draft_rows) * times.decode_seconds(rows, contexts)
        if unit > 0 and warm:
            # A proposal is unusually slow if the draft model has to catch up with a prompt.
            share = min(seconds / unit, MAX_COST_RATIO * self._cost_share)
            self._cost_share += (share - self._cost_share) / COST_WINDOW

    def _best(
        self,
        draft_rows: Sequence[DraftRow],
        expected: Sequence[float],
        load: StepLoad,
        times: StepTimes,
        gains: Sequence[Sequence[float]],
        rows: Sequence[int],
    ) -> int:
        """The number of tokens with the highest expected throughput; 0 if it is highest without this proposer."""
        if not rows:
            return 0
        max_tokens = min(max(len(gains[row]) for row in rows), times.max_drafted(load.rows) // len(rows))
        seconds = times.verify_times(load.rows, load.contexts, max_tokens * len(rows))
        step = seconds[0]
        drafting = self._cost_share * self._target_seconds([draft_rows[row] for row in rows], times)
        in_flight = max(draft_rows[row].in_flight for row in rows)
        others = load.rows + sum(expected)
        best, count = others / step, 0
        for k in range(1, max_tokens + 1):
            gained = others + sum(
                [max(0.0, gains[row][min(k, len(gains[row])) - 1] - expected[row]) for row in rows]
            )
            ratio = gained / ((in_flight + k) * drafting + seconds[k * len(rows)])
            if ratio > best * (1 if count else MARGIN):
                best, count = ratio, k
        return count

    def _probe(
        self, draft_rows: Sequence[DraftRow], load: StepLoad, times: StepTimes, passed: int
    ) -> int | None:
        """The row to probe, or None: rows take turns, and a burst starts when its cost has been credited."""
        seconds = times.verify_times(load.rows, load.contexts, PROBE_TOKENS)
        self._probe_credit += (
            (INITIAL_PROBE_SHARE if self._probes < INITIAL_PROBES else PROBE_SHARE) * seconds[0] * passed
        )
        if self._burst_left:
            names = [draft_row.request.id for draft_row in draft_rows]
            self._burst_left -= 1
            if self._probed_request in names:
                self._probes += 1
                return names.index(self._probed_request)
            self._burst_left = 0
            return None
        row = self._probes // PROBE_BURST % len(draft_rows)
        draft_row = draft_rows[row]
        drafting = (
            (draft_row.in_flight + PROBE_TOKENS) * self._cost_share * self._target_seconds([draft_row], times)
        )
        if self._probe_credit < PROBE_BURST * (drafting + seconds[PROBE_TOKENS] - seconds[0]):
            return None
        self._probe_credit = 0.0
        self._probes += 1
        self._burst_left, self._probed_request = PROBE_BURST - 1, draft_row.request.id
        return row

    def _expected_gains(self, draft_row: DraftRow) -> list[float]:
        """The expected accepted tokens of drafts of 1, 2, … tokens after those in flight."""
        count = min(MAX_PROPOSAL, draft_row.max_tokens)
        request = draft_row.request
        confidences = (round(self._mean_confidence, 2),) * count
        estimates = self._acceptance.estimate(self.proposer.name, request.tenant, request.id, confidences)
        return list(accumulate(list(accumulate(estimates, mul))[draft_row.in_flight :]))

    @staticmethod
    def _target_seconds(draft_rows: Sequence[DraftRow], times: StepTimes) -> float:
        """The target's time for a step of these rows."""
        return times.decode_seconds(len(draft_rows), sum([len(draft_row.tokens) for draft_row in draft_rows]))
