"""`StepCost`: the relative cost of a step in tokens, known before the first step has run."""

from __future__ import annotations

import math
from typing import NamedTuple


class StepCost(NamedTuple):
    """The relative cost of a step.

    ``fixed_tokens`` is the cost of a step without any row. ``context_tokens`` is the context at which a token's
    attention costs as much as the rest of it.
    """

    fixed_tokens: float = 0.0
    context_tokens: float = math.inf

    def rows(self, tokens: int, contexts: int) -> float:
        """The cost of rows with ``tokens`` tokens, the sum of whose contexts is ``contexts``."""
        return tokens + contexts / self.context_tokens

    def longest(self, start: int, budget: float) -> int:
        """The longest row from position ``start`` that costs at most ``budget``.

        Solves ``length * (1 + (start + length / 2) / context_tokens) = budget``.
        """
        if self.context_tokens == math.inf:
            return int(budget)
        slope = 1 + start / self.context_tokens
        return int(
            self.context_tokens * (math.sqrt(slope * slope + 2 * budget / self.context_tokens) - slope)
        )


TOKENS_ONLY = StepCost()
"""Every token costs the same, and a step has no fixed cost."""
