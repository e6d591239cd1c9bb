"""Estimates of the acceptance rate: the probability that a drafted token is accepted, learned from earlier proposals.

```
 logit p  =  calibration[source][position][confidence]  +  tenant offset  +  request offset
             acceptance rate of such confidences           adapts quickly        adapts faster
```
Every proposal is compared with the tokens that followed, whether it was verified or not. So a source whose text has
become predictable is used again, without having cost time on the device. The two offsets are means of normal
distributions, updated as in a Kalman filter: they move far while little is known and less later. A drift is added to
their variance, so that they never stop learning.
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
"""Bounds between the classes of confidence. All confidences of a class share one calibration."""

POSITIONS = (1, 3, 7)
"""Bounds between the classes of positions within a draft, which also share one calibration each."""

PRIOR_TRIALS = 6.0
"""Weight of a source's own confidence at the start, in trials."""

DECAY_TRIALS = 400.0
"""When a calibration class has this many trials, the weight of all of them is halved."""

MAX_TENANTS = 4096
"""Maximum number of tenant offsets, of all sources together; the least recently used is dropped."""

REQUEST_VARIANCE, REQUEST_DRIFT = 1.5, 0.02
"""Variance of a request's offset at the start, and what each trial adds to it."""

TENANT_VARIANCE, TENANT_DRIFT = 0.5, 0.0005
"""The same for a tenant."""

MAX_CACHED = 1024
"""Maximum number of cached lists of confidences per source, with their classes."""

MAX_OFFSET = 6.0
"""Largest absolute value of an offset."""


class Trials(NamedTuple):
    """Outcome of a proposal: the first ``matched`` tokens equal the output; ``mismatched``: the next one differs.

    If nothing is mismatched, the output has not reached the next token, or all tokens matched.
    """

    matched: int
    mismatched: bool


def compare(drafted: Sequence[int], actual: Sequence[int]) -> Trials:
    """Compare drafted tokens with the output tokens at their positions."""
    matched = next(itertools.compress(itertools.count(), map(ne, drafted, actual)), None)
    return (
        Trials(min(len(drafted), len(actual)), mismatched=False)
        if matched is None
        else Trials(matched, mismatched=True)
    )


class Acceptance:
    """Learned acceptance rates of all sources.

    Requests and tenants are keys: the caller drops a request by `ended`, tenants are bounded.
    """

    def __init__(self) -> None:
        self._calibrations: dict[str, _Calibration] = {}
        self._tenants: OrderedDict[tuple[str, str], _Offset] = OrderedDict()
        self._requests: dict[str, dict[str, _Offset]] = {}

    def estimate(
        self, source: str, tenant: str, request_id: str, confidences: tuple[float, ...]
    ) -> tuple[float, ...]:
        """The probability that each token is accepted if all tokens before it are; ``confidences`` are the source's."""
        offset, exp = -self._offset(source, tenant, request_id), math.exp
        estimates: list[float] = []
        for cell, count in self._calibration(source).of(confidences):
            estimates += [1 / (1 + exp(offset - cell.logit))] * count
        return tuple(estimates)

    def learn(
        self, source: str, tenant: str, request_id: str, confidences: tuple[float, ...], trials: Trials
    ) -> None:
        """Learn from a proposal with these ``confidences``."""
        matched, mismatched = trials
        count = tried = matched + mismatched
        if not tried:
            return
        by_tenant, by_request = self._of_tenant(source, tenant), self._of_request(source, request_id)
        offset, exp = -(by_tenant.mean + by_request.mean), math.exp
        residual = information = 0.0
        for cell, run in self._calibration(source).of(confidences):
            p = 1 / (1 + exp(offset - cell.logit))
            each = run if run < tried else tried
            hits = each if each < matched else matched
            residual += hits - each * p
            information += each * p * (1 - p)
            cell.learn(each, hits)
            tried -= each
            matched -= hits
            if not tried:
                break
        by_tenant.update(residual, information, TENANT_DRIFT * count)
        by_request.update(residual, information, REQUEST_DRIFT * count)

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
            if len(self._tenants) > MAX_TENANTS:
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

    def update(self, residual: float, information: float, drift: float) -> None:
        """Update the mean by the ``residual`` (matches minus expected ones) and Fisher ``information`` of trials."""
        self.variance /= 1 + self.variance * information
        self.mean = min(MAX_OFFSET, max(-MAX_OFFSET, self.mean + self.variance * residual))
        self.variance += drift


class _Calibration:
    """Acceptance rates of a source by its confidence and the position in the draft, as logits."""

    def __init__(self) -> None:
        self._cells = [[_Cell(p) for p in _MIDPOINTS] for _ in range(len(POSITIONS) + 1)]
        self._cached: dict[tuple[float, ...], list[tuple[_Cell, int]]] = {}

    def of(self, confidences: tuple[float, ...]) -> list[tuple[_Cell, int]]:
        """The cells of the positions in order, each with the number of successive positions that it covers.

        Most sources repeat the same few lists of confidences, so the cells of each list are cached.
        """
        runs = self._cached.get(confidences)
        if runs is None:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            cells = [
                self._cells[_position_class(position)][bisect_right(CONFIDENCES, confidence)]
                for position, confidence in enumerate(confidences)
            ]
            runs = self._cached[confidences] = [
                (cell, len(list(run))) for cell, run in itertools.groupby(cells)
            ]
        return runs


class _Cell:
    __slots__ = ("logit", "matched", "trials")

    def __init__(self, prior: float) -> None:
        self.trials = PRIOR_TRIALS
        self.matched = PRIOR_TRIALS * prior
        self.logit = math.log(prior / (1 - prior))

    def learn(self, trials: int, matched: int) -> None:
        self.trials += trials
        self.matched += matched
        if self.trials > DECAY_TRIALS:
            self.trials /= 2
            self.matched /= 2
        mismatched = self.trials - self.matched
        self.logit = math.log((self.matched + 0.01) / (mismatched + 0.01))


_EDGES = (0.05, *CONFIDENCES, 0.99)
_MIDPOINTS = tuple((low + high) / 2 for low, high in itertools.pairwise(_EDGES))
_CLASSES = tuple(bisect_right(POSITIONS, position) for position in range(POSITIONS[-1] + 1))


def _position_class(position: int) -> int:
    return _CLASSES[position] if position < len(_CLASSES) else len(POSITIONS)
