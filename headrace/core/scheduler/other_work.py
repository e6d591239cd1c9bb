"""How long other work may take between two steps: it shares with prompts the time that these may add to a step.

```
 other work | a step: decode rows, prompts      the gap between two tokens of a decoding request is as long
 <--------->                    <------->       as with prompts alone
          together the prefill time
```
Beside decode rows alone it takes less, so that the gap is as long as steps often are without it.
"""

from __future__ import annotations

import math

from headrace.core.scheduler.step_builder import StepBuilder, mixed_limit

SHARED = 0.5
"""Share of the prefill time for other work while there are prompts."""

UNBOUND_RATIO = 4.0  # see docs/decisions/models.md#text-beside-images
"""The mixed prefill ratio from which on other work may always take all of its share, as throughput counts most; with a
smaller one it may always take a part that is as much smaller."""

PERCENTILE = 0.95
"""Part of the steps without other work that are shorter than a gap with other work may be."""

LEARNING_RATE = 0.02
"""Relative change of the learned percentile with a step beyond it."""


class OtherWork:
    """Time for other work, and what steps take without it. ``spent_seconds`` were spent since the last step.

    ``usual_stretch`` is a percentile of the seconds of steps over those of their decode rows.
    """

    def __init__(self) -> None:
        self.spent_seconds = 0.0
        self.usual_stretch = 1.0

    def take(self) -> float:
        """The seconds spent, which the next step accounts for."""
        spent, self.spent_seconds = self.spent_seconds, 0.0
        return spent

    def observe(self, step: StepBuilder, seconds: float) -> None:
        """Observe the duration of a step, other work excluded."""
        if step.times is None or not step.decodes or step.spent_seconds:
            return
        above = seconds > self.usual_stretch * step.decode_seconds
        self.usual_stretch *= 1 + LEARNING_RATE * (PERCENTILE - (not above))
        self.usual_stretch = max(1.0, self.usual_stretch)

    def room(self, step: StepBuilder, mixed_ratio: float, waits: bool) -> float:
        """Seconds that other work may take before a step like ``step``; ``mixed_ratio`` as in `Knobs`.

        ``waits``: a prompt waits and can start. It is as long as the step if nothing decodes, or nothing bounds
        prompts; ``inf`` until enough steps were observed.
        """
        if step.times is None:
            return math.inf
        limit = step.limit_seconds if step.decodes else math.inf
        if step.decodes and mixed_ratio:
            limit = min(limit, mixed_limit(step.decode_seconds, mixed_ratio, step.prompts))
        if limit == math.inf:
            return step.times.curve.seconds(step.tokens, step.contexts)
        prompts = waits or not all(step.samples)
        most = max(0.0, limit - step.decode_seconds) * (SHARED if prompts else 1.0)
        least = most * min(1.0, mixed_ratio / UNBOUND_RATIO) if mixed_ratio else most
        usual = 0.0 if prompts else (self.usual_stretch - 1) * step.decode_seconds
        return min(most, max(least, usual))
