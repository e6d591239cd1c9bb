"""Estimates of acceptance: the probability that a drafted token is right, learned from what was right before.

```
 logit p  =  calibration[source][position][confidence]  +  tenant offset  +  request offset
             how often such confidences were right         quick, forgets        quicker
```
Every proposal is compared with the tokens that came, whether it was verified or not. So a source is found again after
the text has become predictable, at no cost on the device. The two offsets are means of normal distributions, updated
as in a Kalman filter: they move far while little is known and less later, and a drift of their variance keeps them
learning.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from operator import ne
from typing import NamedTuple

CONFIDENCES = (0.2, 0.4, 0.55, 0.7, 0.8, 0.87, 0.92, 0.96)
"""Bounds between the classes of confidence that are calibrated together."""

POSITIONS = (1, 3, 7)
"""Bounds between the classes of positions within a draft."""

PRIOR_TRIALS = 6.0
"""Trials that a source's own confidence is worth at the start."""

MEMORY_TRIALS = 400.0
"""Trials of a calibration class after which older ones count half."""

TENANTS = 4096
"""Offsets of tenants kept, for all sources together."""

REQUEST_VARIANCE, REQUEST_DRIFT = 1.5, 0.02
"""Variance of a request's offset at the start, and what each trial adds to it."""

TENANT_VARIANCE, TENANT_DRIFT = 0.5, 0.0005
"""The same for a tenant."""

REMEMBERED = 1024
"""Lists of confidences whose classes are remembered, for each source."""

FARTHEST = 6.0
"""Bound of an offset."""


class Trials(NamedTuple):
    """What became of a proposal: its first ``right`` tokens were right, and the next one was ``wrong`` or is open."""

    right: int
    wrong: bool


def compared(drafted: Sequence[int], came: Sequence[int]) -> Trials:
    """Compare drafted tokens with those that came in their place."""
    right = next(itertools.compress(itertools.count(), map(ne, drafted, came)), None)
    return Trials(min(len(drafted), len(came)), wrong=False) if right is None else Trials(right, wrong=True)


class Acceptance:
    """Learned acceptance of all sources.

    Requests and tenants are keys: the caller drops a request by `ended`, tenants are bounded.
    """

    def __init__(self) -> None:
        self._calibrations: dict[str, _Calibration] = {}
        self._tenants: OrderedDict[tuple[str, str], _Offset] = OrderedDict()
        self._requests: dict[str, dict[str, _Offset]] = {}

    def estimate(
        self, source: str, tenant: str, request_id: str, confidences: tuple[float, ...]
    ) -> tuple[float, ...]:
        """The probability of each token to be right if all tokens before it are; ``confidences`` are the source's."""
        offset, exp = -self._offset(source, tenant, request_id), math.exp
        estimates: list[float] = []
        for cell, count in self._calibration(source).of(confidences):
            estimates += [1 / (1 + exp(offset - cell.logit))] * count
        return tuple(estimates)

    def learn(
        self, source: str, tenant: str, request_id: str, confidences: tuple[float, ...], trials: Trials
    ) -> None:
        """Learn from a proposal with these ``confidences``."""
        right, wrong = trials
        count = tried = right + wrong
        if not tried:
            return
        by_tenant, by_request = self._of_tenant(source, tenant), self._of_request(source, request_id)
        offset, exp = -(by_tenant.mean + by_request.mean), math.exp
        surprise = information = 0.0
        for cell, run in self._calibration(source).of(confidences):
            p = 1 / (1 + exp(offset - cell.logit))
            each = run if run < tried else tried
            hits = each if each < right else right
            surprise += hits - each * p
            information += each * p * (1 - p)
            cell.learn(each, hits)
            tried -= each
            right -= hits
            if not tried:
                break
        by_tenant.move(surprise, information, TENANT_DRIFT * count)
        by_request.move(surprise, information, REQUEST_DRIFT * count)

    def ended(self, request_id: str) -> None:
        """Drop what was learned about a request alone."""
        self._requests.pop(request_id, None)

    def _calibration(self, source: str) -> _Calibration:
        known = self._calibrations.get(source)
        if known is None:
            known = self._calibrations[source] = _Calibration()
        return known

    def _offset(self, source: str, tenant: str, request_id: str) -> float:
        by_tenant = self._tenants.get((source, tenant))
        own = self._requests.get(request_id)
        by_request = None if own is None else own.get(source)
        return (by_tenant.mean if by_tenant else 0.0) + (by_request.mean if by_request else 0.0)

    def _of_request(self, source: str, request_id: str) -> _Offset:
        own = self._requests.setdefault(request_id, {})
        found = own.get(source)
        if found is None:
            found = own[source] = _Offset(REQUEST_VARIANCE)
        return found

    def _of_tenant(self, source: str, tenant: str) -> _Offset:
        name = (source, tenant)
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = _Offset(TENANT_VARIANCE)
            if len(self._tenants) > TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(name)
        return found


class _Offset:
    """The difference of a tenant or a request from the calibration of a source, on the logit scale."""

    __slots__ = ("mean", "variance")

    def __init__(self, variance: float) -> None:
        self.mean = 0.0
        self.variance = variance

    def move(self, surprise: float, information: float, drift: float) -> None:
        """Trials turned out right more often than expected by ``surprise``; they carry this ``information``."""
        self.variance /= 1 + self.variance * information
        self.mean = min(FARTHEST, max(-FARTHEST, self.mean + self.variance * surprise))
        self.variance += drift


class _Calibration:
    """How often a source was right, by its confidence and the position in the draft; kept as logits."""

    def __init__(self) -> None:
        self._cells = [[_Cell(p) for p in _MIDDLES] for _ in range(len(POSITIONS) + 1)]

        self._known: dict[tuple[float, ...], list[tuple[_Cell, int]]] = {}

    def of(self, confidences: tuple[float, ...]) -> list[tuple[_Cell, int]]:
        """The cells of the positions in turn, each with the number of positions that it is for.

        Most sources say the same few confidences again and again, so the cells of these are remembered.
        """
        runs = self._known.get(confidences)
        if runs is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            cells = [
                self._cells[_position_class(position)][bisect_right(CONFIDENCES, confidence)]
                for position, confidence in enumerate(confidences)
            ]
            runs = self._known[confidences] = [
                (cell, len(list(run))) for cell, run in itertools.groupby(cells)
            ]
        return runs


class _Cell:
    __slots__ = ("logit", "right", "trials")

    def __init__(self, prior: float) -> None:
        self.trials = PRIOR_TRIALS
        self.right = PRIOR_TRIALS * prior
        self.logit = math.log(prior / (1 - prior))

    def learn(self, trials: int, right: int) -> None:
        self.trials += trials
        self.right += right
        if self.trials > MEMORY_TRIALS:
            self.trials /= 2
            self.right /= 2
        wrong = self.trials - self.right
        self.logit = math.log((self.right + 0.01) / (wrong + 0.01))


_EDGES = (0.05, *CONFIDENCES, 0.99)
_MIDDLES = tuple((low + high) / 2 for low, high in itertools.pairwise(_EDGES))
_CLASSES = tuple(bisect_right(POSITIONS, position) for position in range(POSITIONS[-1] + 1))


def _position_class(position: int) -> int:
    return _CLASSES[position] if position < len(_CLASSES) else len(POSITIONS)
