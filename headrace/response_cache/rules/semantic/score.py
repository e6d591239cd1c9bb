"""The score of the semantic cache: the log-odds that two requests have the same answer, monotone in the evidence.

Each part of the evidence passes through its own rising, piecewise linear curve; the sum is the log-odds of "the same
answer". Such a score can be inspected part by part, takes microseconds, and cannot learn that a nearer neighbour is
worse. `response_cache.calibration.fit` fits the curves; this file evaluates them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

NO_NEIGHBOUR = 0.2
"""The cosine of unrelated questions: a substitute for entries that a small cache does not have yet."""


class Evidence(NamedTuple):
    """Evidence that two questions have the same answer; in every part more is better.

    Cosines: ``cosine`` to the question whose response would be served, ``margin`` of the answer's nearest question
    over the nearest one with another answer, ``second`` of the answer's second question. Shares: ``agreement`` of the
    ten nearest with the answer; ``shared`` content words, ``kept`` (not substituted) ones, their ``order``,
    similarity of ``length`` in words. ``posterior`` is the log-odds of the answer among all neighbours, weighted by
    nearness. ``complete`` is 0 if a question refers to something outside of it.
    """

    cosine: float
    margin: float
    agreement: float
    posterior: float
    second: float
    shared: float
    kept: float
    order: float
    length: float
    complete: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising, piecewise linear function: ``values`` at ``knots``, constant outside of them."""

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a <= b for a, b in zip(self.values, self.values[1:], strict=False))
        apart = all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False))
        if len(self.knots) != len(self.values) or len(self.knots) < 2 or not rising or not apart:
            raise ValueError("a curve needs two or more ascending knots, and as many values that do not fall")
        if not all(map(math.isfinite, (*self.knots, *self.values))):
            raise ValueError("a curve's knots and values must be finite")

    def __call__(self, x: float) -> float:
        place = bisect_right(self.knots, x)
        if place == 0:
            return self.values[0]
        if place == len(self.knots):
            return self.values[-1]
        left, right = self.knots[place - 1], self.knots[place]
        low, high = self.values[place - 1], self.values[place]
        return low + (high - low) * (x - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Score:
    """Log-odds of the same answer: ``intercept`` plus the curves of the parts of the evidence that count."""

    intercept: float
    curves: tuple[tuple[str, Curve], ...]

    def __post_init__(self) -> None:
        unknown = {name for name, _ in self.curves} - set(Evidence._fields)
        if unknown:
            raise ValueError(f"unknown evidence: {', '.join(sorted(unknown))}")

    def __call__(self, evidence: Evidence) -> float:
        return self.intercept + sum(curve(getattr(evidence, name)) for name, curve in self.curves)

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers; `from_json` reads it back."""
        curves = {name: {"knots": curve.knots, "values": curve.values} for name, curve in self.curves}
        return {"intercept": self.intercept, "curves": curves}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Score:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a part is missing or invalid.
        """
        try:
            curves = tuple(
                (name, Curve(tuple(map(float, curve["knots"])), tuple(map(float, curve["values"]))))
                for name, curve in content["curves"].items()
            )
            return Score(float(content["intercept"]), curves)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a score: {error!r}") from error
