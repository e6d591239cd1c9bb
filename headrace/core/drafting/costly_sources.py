"""Whether to ask a proposer whose proposals take time on the device: how many tokens, and for which rows.

```
 without it      rows + free drafts              tokens a step, in its predicted time
 with k tokens   rows + free drafts + more(k)    in that time + k * share * time of a step + verification
```
It is asked for the ``k`` that makes the second ratio largest, if that is larger than the first. If it is not, it is
asked for a few tokens now and then, so that acceptance and costs stay known: these probes take at most `PROBES` of the
time. They come in bursts at successive steps, because what a model has not done for a while takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import MARGIN
from headrace.core.drafting.proposal import CostlyProposer, DraftAsk, StepLoad
from headrace.core.prediction.step_times import StepTimes

PROBES = 0.01
"""Share of the device's time for proposals that are made only to learn how good they are."""

FIRST_PROBES, FIRST_SHARE = 48, 0.2
"""The first probes may take this share, as the costs of drafting and of verifying are not known before."""

PROBE_TOKENS, BURST = 3, 4
"""Tokens of a probe, and probes at successive steps."""

USUAL, USUAL_MEMORY = 0.75, 32
"""The confidence that proposals are assumed to have before the first one, and the tokens over which it is averaged."""

LONGEST = 16
"""The longest proposal that is considered."""

SHARE_MEMORY = 8
"""Proposals over which their cost is averaged."""

MOST_OFF = 3.0
"""The largest multiple of the usual cost that counts."""


class CostlySource:
    """A proposer with the cost of its proposals.

    ``share`` is the time of drafting one token for some rows, as a share of the target's time for a step of these rows.
    It is learned: the one given is a first estimate.
    """

    def __init__(self, proposer: CostlyProposer, share: float, acceptance: Acceptance) -> None:
        self.proposer = proposer
        self._share = share
        self._acceptance = acceptance
        self._usual = USUAL
        self._credit = 0.0  # seconds for probes
        self._probes = 0
        self._burst = 0  # probes that follow at the next steps
        self._probed_request = ""
        self._warm = False  # whether it was asked at the step before
        self._rest = 0
        self._considered: int | None = None  # the last step at which it was considered
        self.resting_until = 0
        """The first step at which it is considered again."""
        self.probing = False
        """Whether the tokens that were asked for last are a probe: they are verified whatever they seem to cost."""

    def worth(
        self, asks: Sequence[DraftAsk], held: Sequence[float], load: StepLoad, fixed: int | None, longest: int
    ) -> list[int]:
        """The most tokens to ask for, by row; ``held`` are the tokens expected from other proposals.

        If it is not worth asking, that is not considered again for a while, at most ``longest`` steps.
        """
        if fixed is not None:
            return [0 if held[row] else ask.ahead + fixed for row, ask in enumerate(asks)]
        times, self.probing = load.times, False
        if times is None or load.step < self.resting_until:
            return [0] * len(asks)
        passed = 1 if self._considered is None else load.step - self._considered
        self._considered = load.step
        self._warm = self._warm and passed == 1
        gains = [self._gains(ask) for ask in asks]
        rows = [row for row, each in enumerate(gains) if each[-1:] > [held[row]]]
        count = self._best(asks, held, load, times, gains, rows)
        chosen = [0] * len(asks)
        if count:
            self._rest = 0
            for row in rows:
                chosen[row] = asks[row].ahead + count
            return chosen
        probed = self._probe(asks, load, times, passed)
        if probed is not None:
            chosen[probed] = asks[probed].ahead + PROBE_TOKENS
            self.probing = True
        if not self._burst:
            self._rest = min(longest, 2 * self._rest + 1)
            self.resting_until = load.step + 1 + self._rest
        return chosen

    def proposed(self, confidences: Sequence[float]) -> None:
        """It proposed tokens with these confidences."""
        rate = min(1.0, len(confidences) / USUAL_MEMORY)
        self._usual += (sum(confidences) / len(confidences) - self._usual) * rate

    def spent(self, asks: Sequence[DraftAsk], seconds: float, times: StepTimes | None) -> None:
        """Proposals for ``asks``, at least one, took ``seconds``: they are no part of the step that is observed."""
        warm, self._warm = self._warm, True
        if times is None:
            return
        times.exclude(seconds)
        rows, contexts = len(asks), sum(len(ask.tokens) for ask in asks)
        unit = max(ask.most for ask in asks) * times.decodes(rows, contexts)
        if unit > 0 and warm:
            # A prompt that was caught up makes a proposal unusually long.
            share = min(seconds / unit, MOST_OFF * self._share)
            self._share += (share - self._share) / SHARE_MEMORY

    def _best(
        self,
        asks: Sequence[DraftAsk],
        held: Sequence[float],
        load: StepLoad,
        times: StepTimes,
        gains: Sequence[Sequence[float]],
        rows: Sequence[int],
    ) -> int:
        """The number of tokens with which the most are expected per second; 0 is best without it."""
        if not rows:
            return 0
        most = min(max(len(gains[row]) for row in rows), times.reach(load.rows) // len(rows))
        stairs = times.stairs(load.rows, load.contexts, most * len(rows))
        step = stairs[0]
        drafting = self._share * self._plain([asks[row] for row in rows], times)
        ahead = max(asks[row].ahead for row in rows)
        others = load.rows + sum(held)
        best, count = others / step, 0
        for k in range(1, most + 1):
            gained = others + sum(
                [max(0.0, gains[row][min(k, len(gains[row])) - 1] - held[row]) for row in rows]
            )
            ratio = gained / ((ahead + k) * drafting + stairs[k * len(rows)])
            if ratio > best * (1 if count else MARGIN):
                best, count = ratio, k
        return count

    def _probe(self, asks: Sequence[DraftAsk], load: StepLoad, times: StepTimes, passed: int) -> int | None:
        """The row for which a few tokens are asked: rows in turn, as soon as probes have credit for a burst."""
        stairs = times.stairs(load.rows, load.contexts, PROBE_TOKENS)
        self._credit += (FIRST_SHARE if self._probes < FIRST_PROBES else PROBES) * stairs[0] * passed
        if self._burst:
            names = [ask.request.id for ask in asks]
            self._burst -= 1
            if self._probed_request in names:
                self._probes += 1
                return names.index(self._probed_request)
            self._burst = 0
            return None
        row = self._probes // BURST % len(asks)
        ask = asks[row]
        drafting = (ask.ahead + PROBE_TOKENS) * self._share * self._plain([ask], times)
        if self._credit < BURST * (drafting + stairs[PROBE_TOKENS] - stairs[0]):
            return None
        self._credit = 0.0
        self._probes += 1
        self._burst, self._probed_request = BURST - 1, ask.request.id
        return row

    def _gains(self, ask: DraftAsk) -> list[float]:
        """The tokens expected of 1, 2, … tokens after those in flight."""
        count = min(LONGEST, ask.most)
        request = ask.request
        confidences = (round(self._usual, 2),) * count
        usual = self._acceptance.estimate(self.proposer.name, request.tenant, request.id, confidences)
        return list(accumulate(list(accumulate(usual, mul))[ask.ahead :]))

    @staticmethod
    def _plain(asks: Sequence[DraftAsk], times: StepTimes) -> float:
        """The target's time for a step of these rows."""
        return times.decodes(len(asks), sum([len(ask.tokens) for ask in asks]))
