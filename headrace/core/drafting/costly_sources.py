"""Whether to ask a proposer whose proposals take time on the device: how many tokens, and for which rows.

```
 without it      rows + free drafts              tokens a step, in its predicted time
 with k tokens   rows + free drafts + more(k)    in that time + k * share * time of a step + verification
```
It is asked for the ``k`` that makes the second ratio largest, if that is larger than the first. If it is not, it is
asked for one token now and then, so that its acceptance stays known: these probes take at most `PROBES` of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import MARGIN
from headrace.core.drafting.proposal import DraftAsk, Proposer, StepLoad
from headrace.core.prediction.step_times import StepTimes

PROBES = 0.01
"""Share of the device's time for proposals that are made only to learn how good they are."""

USUAL = 0.75
"""The confidence that a proposal is assumed to have before it is made."""

LONGEST = 16
"""The longest proposal that is considered."""


class CostlySource:
    """A proposer with the cost of its proposals.

    ``share`` is the time of drafting one token for some rows, as a share of the target's time for a step of these rows.
    """

    def __init__(self, proposer: Proposer, share: float, acceptance: Acceptance) -> None:
        self.proposer = proposer
        self._share = share
        self._acceptance = acceptance
        self._credit = 0.0  # seconds for probes
        self._probes = 0

    def worth(
        self, asks: Sequence[DraftAsk], held: Sequence[float], load: StepLoad, fixed: int | None
    ) -> list[int]:
        """The most tokens to ask for, by row; ``held`` are the tokens expected from other proposals."""
        if fixed is not None:
            return [0 if held[row] else ask.ahead + fixed for row, ask in enumerate(asks)]
        times = load.times
        if times is None:
            return [0] * len(asks)
        step = times.decodes(load.rows, load.contexts)
        gains = [self._gains(ask) for ask in asks]
        rows = [row for row, each in enumerate(gains) if sum(each) > held[row]]
        best, count = (load.rows + sum(held)) / step, 0
        for k in range(1, 1 + max((len(gains[row]) for row in rows), default=0)):
            gained = load.rows + sum(
                max(held[row], sum(each[:k])) if row in rows else held[row] for row, each in enumerate(gains)
            )
            ratio = gained / (step + self._seconds(load, times, [asks[row] for row in rows], k))
            if ratio > best * (1 if count else MARGIN):
                best, count = ratio, k
        chosen = [0] * len(asks)
        if count:
            for row in rows:
                chosen[row] = asks[row].ahead + count
            return chosen
        return self._probed(asks, load, step, chosen)

    def _probed(self, asks: Sequence[DraftAsk], load: StepLoad, step: float, chosen: list[int]) -> list[int]:
        """One token for one row, in turn, as soon as probes have credit for it."""
        self._credit += PROBES * step
        row = self._probes % len(asks)
        assert load.times is not None
        seconds = self._seconds(load, load.times, asks[row : row + 1], 1)
        if self._credit >= seconds:
            self._credit = 0.0
            self._probes += 1
            chosen[row] = asks[row].ahead + 1
        return chosen

    def _gains(self, ask: DraftAsk) -> list[float]:
        """The chance of each token after those in flight to be right with all before it."""
        count = min(LONGEST, ask.most)
        request = ask.request
        usual = self._acceptance.estimate(self.proposer.name, request.tenant, request.id, (USUAL,) * count)
        return list(accumulate(usual, mul))[ask.ahead :]

    def _seconds(self, load: StepLoad, times: StepTimes, asks: Sequence[DraftAsk], k: int) -> float:
        """The time of drafting ``k`` tokens for ``asks``, and of verifying them."""
        rows, contexts = len(asks), sum(len(ask.tokens) for ask in asks)
        ahead = max((ask.ahead for ask in asks), default=0)
        drafting = (ahead + k) * self._share * times.decodes(rows, contexts)
        longer = times.drafted(load.rows, load.tokens + k * rows, load.contexts + k * contexts)
        return drafting + max(0.0, longer - times.decodes(load.rows, load.contexts))
