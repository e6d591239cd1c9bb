"""How long other work may take between two steps: it shares with prompts the time that these may add to a step.

```
 other work | a step: decode rows, prompts      the gap between two tokens of a decoding request is as long
 <--------->                    <------->       as with prompts alone
          together the prefill time
```
"""

from __future__ import annotations

import math

from headrace.core.scheduler.step_builder import StepBuilder, mixed_limit

SHARED = 0.5
"""Share of the prefill time for other work while there are prompts."""


def room_before(step: StepBuilder, mixed_ratio: float) -> float:
    """Seconds that other work may take before a step like ``step``; ``mixed_ratio`` as in `Knobs`.

    It is as long as the step if nothing decodes, or nothing bounds prompts; ``inf`` until enough steps were observed.
    """
    if step.times is None:
        return math.inf
    limit = step.limit_seconds if step.decodes else math.inf
    if step.decodes and mixed_ratio:
        limit = min(limit, mixed_limit(step.decode_seconds, mixed_ratio, step.prompts))
    if limit == math.inf:
        return step.times.curve.seconds(step.tokens, step.contexts)
    return max(0.0, limit - step.decode_seconds) * (SHARED if step.prompts else 1.0)
