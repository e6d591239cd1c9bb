"""Simpler rules for serving a similar request's response, as baselines.

Both look at the nearest entry only. `FixedCosine` is what most caches do. `PerEntry` is our own implementation of the
rule of vCache (arXiv:2502.03771): each entry learns its own similarity threshold from its history, and explores while
the threshold is uncertain. It bounds errors per request, not per hit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple, Protocol

from headrace.response_cache.semantic.calibrate import PlayedStream


class NearestRule(Protocol):
    """Decides whether to serve the nearest entry's response, and learns from responses that were computed instead."""

    def serve(self, entry: int, cosine: float) -> bool: ...

    def learn(self, entry: int, cosine: float, right: bool) -> bool:
        """Takes how a computed response compares; returns whether the request becomes an entry too."""
        ...


class Outcome(NamedTuple):
    """Counts of a simulated rule: requests, hits, and wrong hits."""

    asked: int
    served: int
    wrong: int

    @property
    def hit_rate(self) -> float:
        return self.served / self.asked if self.asked else 0.0

    @property
    def wrong_per_hit(self) -> float:
        return self.wrong / self.served if self.served else 0.0


class FixedCosine:
    """Serves if the cosine similarity is at least ``threshold``."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def serve(self, entry: int, cosine: float) -> bool:
        return cosine >= self._threshold

    def learn(self, entry: int, cosine: float, right: bool) -> bool:
        return True


class PerEntry:
    """Serves with the probability that bounds errors per request by ``delta``.

    An entry with at least ``_LEAST`` observations fits P(right | s) = sigma(gamma * (s - t)); t is below t'(e') with
    confidence 1 - e'. A request is computed (explored) with probability min over e' of
    1 - delta / (1 - (1 - e') * sigma(gamma * (s - t'(e')))).
    """

    _LEAST = 4
    _DOUBTS = tuple(step / 50 for step in range(1, 50))
    _QUANTILES = tuple(NormalDist().inv_cdf(1.0 - step / 50) for step in range(1, 50))

    def __init__(self, delta: float, seed: int = 0) -> None:
        self._delta = delta
        self._draw = random.Random(seed)
        self._seen: dict[int, list[tuple[float, bool]]] = {}
        self._fits: dict[int, tuple[float, float, float]] = {}

    def serve(self, entry: int, cosine: float) -> bool:
        if len(self._seen.get(entry, ())) < self._LEAST:
            return False
        if entry not in self._fits:
            self._fits[entry] = _fit_threshold(self._seen[entry])
        gamma, limit, error = self._fits[entry]
        explore = min(
            1.0
            - self._delta
            / max(1e-9, 1.0 - (1.0 - doubt) * _sigma(gamma * (cosine - limit - quantile * error)))
            for doubt, quantile in zip(self._DOUBTS, self._QUANTILES, strict=True)
        )
        return self._draw.random() >= explore

    def learn(self, entry: int, cosine: float, right: bool) -> bool:
        self._seen.setdefault(entry, []).append((cosine, right))
        self._fits.pop(entry, None)
        return not right  # no second entry for the same answer, so that the first one gets all observations


def play_rule(stream: PlayedStream, rule: NearestRule) -> Outcome:
    """Simulates ``stream`` from an empty cache; misses are computed."""
    served = wrong = 0
    cached = bytearray(len(stream))
    for row in range(len(stream)):
        found = next(((e, c) for e, c in stream.earlier(row) if cached[e]), None)
        if found is not None:
            entry, cosine = found
            right = stream.answers[entry] == stream.answers[row]
            if rule.serve(entry, cosine):
                served += 1
                wrong += not right
                continue
            cached[row] = rule.learn(entry, cosine, right)
        else:
            cached[row] = True
    return Outcome(len(stream), served, wrong)


def pick(outcomes: Sequence[Outcome], max_error: float) -> int | None:
    """Index of the outcome with the most hits among those with a share of wrong hits of at most ``max_error``."""
    fitting = [i for i, each in enumerate(outcomes) if each.served and each.wrong_per_hit <= max_error]
    return max(fitting, key=lambda index: outcomes[index].served, default=None)


_PRIOR_SLOPE = 30.0
_RIDGE = 0.02
_CENTRE = 0.8
"""Weak prior of the curve's slope, since few observations often have the same outcome and do not determine one."""


def _fit_threshold(seen: Sequence[tuple[float, bool]]) -> tuple[float, float, float]:
    """Slope, threshold and the threshold's standard error of a logistic curve through one entry's observations."""
    intercept, slope = 0.0, _PRIOR_SLOPE  # log-odds = intercept + slope * (cosine - centre)
    for _ in range(25):  # Newton
        to_intercept, to_slope = -_RIDGE * intercept, -_RIDGE * (slope - _PRIOR_SLOPE)
        aa, ab, bb = _RIDGE, 0.0, _RIDGE
        for cosine, right in seen:
            x = cosine - _CENTRE
            likely = _sigma(intercept + slope * x)
            weight = likely * (1.0 - likely)
            to_intercept += right - likely
            to_slope += (right - likely) * x
            aa += weight
            ab += weight * x
            bb += weight * x * x
        determinant = aa * bb - ab * ab
        intercept += (bb * to_intercept - ab * to_slope) / determinant
        slope += (aa * to_slope - ab * to_intercept) / determinant
    slope = max(slope, 1e-3)
    by_intercept, by_slope = -1.0 / slope, intercept / slope**2  # of the threshold: delta method
    variance = (by_intercept**2 * bb - 2.0 * by_intercept * by_slope * ab + by_slope**2 * aa) / determinant
    return slope, _CENTRE - intercept / slope, math.sqrt(max(0.0, variance))


def _sigma(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, x))))
