"""`StepCost`: the relative cost of a step in tokens, known before the first step has run."""

from __future__ import annotations

import math
import sys
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
        return longest_row(budget, 1 + start / self.context_tokens, 1 / self.context_tokens)


def longest_row(budget: float, token: float, context: float) -> int:
    """The largest n with ``token * n + context / 2 * n ** 2 <= budget``; unbounded if tokens cost nothing."""
    if budget <= 0:
        return 0
    if budget == math.inf:
        return sys.maxsize
    # in the form that has no difference of almost equal numbers
    divisor = token + math.sqrt(token * token + 2 * context * budget)
    return int(2 * budget / divisor) if divisor > 0 else sys.maxsize


TOKENS_ONLY = StepCost()
"""Every token costs the same, and a step has no fixed cost."""
