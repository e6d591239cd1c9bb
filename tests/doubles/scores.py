"""Log-probabilities of one model from two ways of computing it."""

from __future__ import annotations

TOLERANCE = 1e-3
"""A sum in single precision differs by some 1e-6 from the same one in another order."""


class Score(float):
    """A log-probability that equals each one within `TOLERANCE`; rounded ones would differ at a rounding edge."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) <= TOLERANCE

    def __ne__(self, other: object) -> bool:
        return not self == other
