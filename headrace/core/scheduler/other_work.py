"""How long other work may take between two steps: it shares with prompts the time that these may add to a step.

```
 other work | a step: decode rows, prompts      the gap between two tokens of a decoding request is as long
 <--------->                    <------->       as with prompts alone
          together the prefill time
```
Beside decode rows alone it takes less, so that the gap is as long as steps often are without it. While work in the
background takes cores from steps, a part of the prefill time is left free for their delay. With other work or images
nearly every step is as long as it may be, so a part is left free then as well.
"""

from __future__ import annotations

import math

from headrace.core.scheduler.step_builder import StepBuilder, mixed_limit

SHARED = 0.5
"""Share of the prefill time for other work while there are prompts."""

UNBOUND_RATIO = 4.0  # see docs/decisions/models.md#text-beside-images
"""The mixed prefill ratio from which on other work may always take all of its share, as throughput counts most; with a
smaller one it may always take a part that is as much smaller."""

LEFT_FREE = 0.5
"""Share of the prefill time that nothing takes while there is work in the background."""

LEFT_FREE_OFTEN = 0.25  # see docs/decisions/models.md#text-beside-images
"""The same in steps with other work or prompts with images, where a mixed prefill ratio below `UNBOUND_RATIO` says that
gaps count. Without them half of the steps have a prompt, so the longest hundredth of the gaps is drawn from fewer."""

PERCENTILE = 0.95
"""Part of the steps without other work that are shorter than a gap with other work may be."""

LEARNING_RATE = 0.02
"""Relative change of the learned percentile with a step beyond it."""


class OtherWork:
    """Time for other work, and what steps take without it. ``spent_seconds`` were spent since the last step.

    ``background`` is the number of works that go on beside the steps, such as images that are decoded.
    ``usual_stretch`` is a percentile of the seconds of steps over those of their decode rows.
    """

    def __init__(self) -> None:
        self.spent_seconds = 0.0
        self.background = 0
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

    def left_free(self, step: StepBuilder, mixed_ratio: float, often: bool) -> float:
        """Seconds of the prefill time of ``step`` that neither prompts nor other work may take.

        ``often``: there is other work, or a prompt with images.
        """
        limit = _limit(step, mixed_ratio)
        if step.times is None or limit == math.inf:
            return 0.0
        share = (
            LEFT_FREE
            if self.background
            else LEFT_FREE_OFTEN
            if often and mixed_ratio < UNBOUND_RATIO
            else 0.0
        )
        return share * max(0.0, limit - step.decode_seconds)

    def room(self, step: StepBuilder, mixed_ratio: float, waits: bool) -> float:
        """Seconds that other work may take before a step like ``step``; ``mixed_ratio`` as in `Knobs`.

        ``waits``: a prompt waits and can start. It is as long as the step if nothing decodes, or nothing bounds
        prompts; ``inf`` until enough steps were observed.
        """
        if step.times is None:
            return math.inf
        limit = _limit(step, mixed_ratio)
        if limit == math.inf:
            return step.times.curve.seconds(step.tokens, step.contexts)
        prompts = waits or not all(step.samples)
        most = max(0.0, limit - step.decode_seconds) - self.left_free(step, mixed_ratio, True)
        most *= SHARED if prompts else 1.0
        least = most * min(1.0, mixed_ratio / UNBOUND_RATIO) if mixed_ratio else most
        usual = 0.0 if prompts else (self.usual_stretch - 1) * step.decode_seconds
        return min(most, max(least, usual))


def _limit(step: StepBuilder, mixed_ratio: float) -> float:
    """Seconds that ``step`` may take with prompts; ``inf`` if nothing bounds them."""
    if not step.decodes:
        return math.inf
    mixed = mixed_limit(step.decode_seconds, mixed_ratio, step.prompts) if mixed_ratio else math.inf
    return min(step.limit_seconds, mixed)
