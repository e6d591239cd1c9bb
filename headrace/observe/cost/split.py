"""Divides a step's seconds among its rows, by what each row would add to the duration of the step.

```
 weight of a row = row + token * length + context * contexts + fixed * length / tokens of the step
```
The four coefficients are those that `core.prediction.step_times` has learned on this device. Attention and linear
layers count by a row's own work; shared work (reading the weights, launches) is divided by tokens. Weights are scaled
so that the shares always add up to the measured seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.plan import Row

Coefficients = tuple[float, float, float, float]
"""Seconds per step, row, token, and position attended to."""

BY_TOKENS: Coefficients = (1.0, 0.0, 0.0, 0.0)
"""Coefficients with which every token costs the same."""


def shares(rows: Sequence[Row], tokens: int, seconds: float, coefficients: Coefficients) -> list[float]:
    """The seconds of each row of a step that computed ``tokens`` tokens in ``seconds``."""
    fixed, per_row, per_token, per_context = coefficients
    per_token += fixed / tokens
    if tokens == len(rows):
        per_row += per_token
        weights = [per_row + per_context * row[1] for row in rows]
    else:
        weights = [
            per_row + row[2] * (per_token + per_context * (row[1] + 0.5 * (row[2] - 1))) for row in rows
        ]
    total = sum(weights)
    if total <= 0.0:
        return shares(rows, tokens, seconds, BY_TOKENS)
    scale = seconds / total
    return [scale * weight for weight in weights]
