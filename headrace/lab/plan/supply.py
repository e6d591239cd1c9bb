"""Spare replicas for failures and spot interruptions, and their cost.

A lost replica returns after the recovery time. The number of unavailable replicas is modelled as a Poisson variable
whose mean is the number of replicas times the unavailable share of time. The spares cover its 99.9th percentile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONFIDENCE = 0.999
"""Share of time in which enough replicas must be available."""

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Supply:
    """Prices and failure rates of the machines.

    ``spot_share`` of the replicas run on spot machines, at ``spot_price`` times the on-demand price, with
    ``spot_interruptions`` per hour each. Every replica has ``failures`` per hour. ``recovery_seconds`` include loading
    the weights.
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
        """Mean number of unavailable replicas."""
        losses = self.failures + self.spot_share * self.spot_interruptions
        return replicas * _away(losses * self.recovery_seconds / HOUR)

    def replicas(self, needed: int) -> int:
        """The fewest replicas of which ``needed`` are available for `CONFIDENCE` of the time."""
        total = needed
        while total - _quantile(self.away(total)) < needed:
            total = needed + _quantile(self.away(total))
        return total


ON_DEMAND = Supply()
"""On-demand machines that never fail."""


def _away(mean_losses: float) -> float:
    """Unavailable share of time of a replica, from its mean number of losses per recovery time."""
    return mean_losses / (1.0 + mean_losses)


def _quantile(mean: float) -> int:
    """The smallest number that a Poisson variable does not exceed with the probability `CONFIDENCE`."""
    count, below = -1, 0.0
    while below < CONFIDENCE:
        count += 1
        below += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) if mean else 1.0
    return count
