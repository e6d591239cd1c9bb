"""What a step costs in tokens, known before the first step has run: `StepCost`."""

from __future__ import annotations

import math
from typing import NamedTuple


class StepCost(NamedTuple):
    """``fixed_tokens``: a step's cost without any row; ``context_tokens``: the context at which a token's attention
    costs as much as the rest of it."""

    fixed_tokens: float = 0.0
    context_tokens: float = math.inf

    def rows(self, tokens: int, contexts: int) -> float:
        """The cost of rows with so many tokens, the sum of whose contexts is ``contexts``."""
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
"""Every token costs the same, a step itself nothing."""
