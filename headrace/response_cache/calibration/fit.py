"""Fit of the semantic cache's score: monotone curves whose sum is the log-odds of an equal answer.

Logistic regression over the segments of piecewise linear functions with non-negative slopes. The problem is convex and
solved by accelerated projected gradients (Beck and Teboulle, 2009). With some dozens of slopes, a few thousand labelled
decisions are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.response_cache.rules.semantic.score import Curve, Evidence, Score

_QUANTILES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
_STEPS = 600
_RIDGE = 1.0

_Floats = NDArray[np.float64]


def fit_score(
    evidence: Sequence[Evidence], right: Sequence[bool], parts: Sequence[str] = Evidence._fields
) -> Score:
    """The score that fits ``right`` best, from the named ``parts`` of the evidence.

    Raises:
        ValueError: all decisions have the same outcome.
    """
    if not 0 < sum(right) < len(right):
        raise ValueError("fitting needs both right and wrong decisions")
    columns = {part: np.array([getattr(each, part) for each in evidence], np.float64) for part in parts}
    knots = {part: np.unique(np.quantile(column, _QUANTILES)) for part, column in columns.items()}
    varying = [part for part in parts if len(knots[part]) > 1]
    segments = [_segments(columns[part], knots[part]) for part in varying]
    slopes, intercept = _solve(np.hstack(segments), np.array(right, np.float64))
    curves = []
    for part in varying:
        own, slopes = np.split(slopes, [len(knots[part]) - 1])
        values = np.concatenate([[0.0], np.cumsum(own * np.diff(knots[part]))])
        if values[-1] > 0.0:
            curves.append((part, Curve(tuple(knots[part].tolist()), tuple(values.tolist()))))
    return Score(intercept, tuple(curves))


def _segments(column: _Floats, knots: _Floats) -> _Floats:
    """Length of each segment between the knots that lies below each value, [rows, segments]."""
    reach: _Floats = np.clip(column[:, None], knots[:-1], knots[1:]) - knots[:-1]
    return reach


def _solve(inputs: _Floats, right: _Floats) -> tuple[_Floats, float]:
    """Non-negative slopes and the intercept that minimize the regularized logistic loss."""
    scale = inputs.std(0) + 1e-9
    design = np.column_stack([inputs / scale, np.ones(len(inputs))])
    ridge = np.full(design.shape[1], _RIDGE)
    ridge[-1] = 0.0
    curvature = 0.25 * np.linalg.norm(design, 2) ** 2 + _RIDGE
    weights = np.zeros(design.shape[1])
    weights[-1] = np.log(right.mean() / (1.0 - right.mean()))
    ahead, momentum = weights.copy(), 1.0
    for _ in range(_STEPS):
        likely = 1.0 / (1.0 + np.exp(-design @ ahead))
        step = ahead - (design.T @ (likely - right) + ridge * ahead) / curvature
        step[:-1] = np.maximum(step[:-1], 0.0)
        following = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        if (ahead - step) @ (step - weights) > 0.0:  # overshot: restart the momentum (O'Donoghue, Candes)
            following, ahead = 1.0, step.copy()
        else:
            ahead = step + (momentum - 1.0) / following * (step - weights)
        weights, momentum = step, following
    return weights[:-1] / scale, float(weights[-1])
