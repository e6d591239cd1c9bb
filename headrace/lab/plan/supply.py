"""How many replicas to run so that enough of them are there: failures, spot machines, and what that costs.

A replica that is lost comes back after the time of recovery. The number of replicas that are away at a moment is then
a Poisson variable, whose mean is the sum of the shares of time that replicas are away. As many more are run as are away
at all but one of a thousand moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE = 0.999
"""Share of moments at which enough replicas are there."""

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Supply:
    """Where replicas run.

    ``spot_share`` of them run on spot machines, at ``spot_price`` times the price, and lose them
    ``spot_interruptions`` times an hour. All fail ``failures`` times an hour. A replica is back after
    ``recovery_seconds``, loading its weights included.
    """

    spot_share: float = 0.0
    spot_price: float = 0.4
    spot_interruptions: float = 0.05
    failures: float = 0.0
    recovery_seconds: float = 300.0

    @property
    def price(self) -> float:
        """The mean price of a replica as a share of the on-demand price."""
        return 1.0 - self.spot_share * (1.0 - self.spot_price)

    def away(self, replicas: int) -> float:
        """The mean number of replicas that are away."""
        losses = self.failures + self.spot_share * self.spot_interruptions
        return replicas * _away(losses * self.recovery_seconds / HOUR)

    def replicas(self, needed: int) -> int:
        """The fewest replicas of which ``needed`` are there at `CONFIDENCE` of the moments."""
        total = needed
        while total - _quantile(self.away(total)) < needed:
            total = needed + _quantile(self.away(total))
        return total


ON_DEMAND = Supply()
"""Machines of the usual price that never fail."""


def _away(mean_losses: float) -> float:
    """The share of time that a replica is away, from its losses in a time of recovery."""
    return mean_losses / (1.0 + mean_losses)


def _quantile(mean: float) -> int:
    """The smallest number that a Poisson variable does not exceed with the probability `CONFIDENCE`."""
    count, below = -1, 0.0
    while below < CONFIDENCE:
        count += 1
        below += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) if mean else 1.0
    return count
