"""The objective of tuning: the share of requests within the latency targets, or without targets the time per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.lab.bench.record import Record
from headrace.lab.bench.stats import slo_share

TIE_BREAK = 0.01
"""Value of a time per token that is shorter by a factor of e, as a share of requests; it breaks ties between settings
that meet the targets equally."""


class Goal:
    """``slo`` are latency targets in seconds by quantity (`stats.SLO_NAMES`); empty for the time per token."""

    def __init__(self, slo: Mapping[str, float]) -> None:
        self.slo = dict(slo)

    def value(self, records: Sequence[Record]) -> float:
        """The value to compare; larger is better: a share of requests, or minus the logarithm of the time per token."""
        return slo_share(records, self.slo) if self.slo else -math.log(time_per_token(records))

    def score(self, records: Sequence[Record]) -> float:
        """The value to search for: `value`, with the time per token as tie-break."""
        value = self.value(records)
        return value - TIE_BREAK * math.log(time_per_token(records)) if self.slo else value

    @property
    def name(self) -> str:
        """The quantity in reports."""
        return "requests within SLO" if self.slo else "time per output token"

    def shown(self, value: float) -> str:
        """A value in reports."""
        return f"{100 * value:.1f} %" if self.slo else f"{1000 * math.exp(-value):.2f} ms"

    def shown_gain(self, difference: float) -> str:
        """A difference in reports; positive is better."""
        if math.isinf(difference):
            return "unknown"
        return (
            f"{100 * difference:+.1f} points" if self.slo else f"{100 * (1 - math.exp(-difference)):+.1f} %"
        )


def time_per_token(records: Sequence[Record]) -> float:
    """Sum of end-to-end seconds divided by output tokens. A failed request counts with the slowest time and no tokens.
    Infinite if all failed."""
    whole = [each for each in records if not each.error]
    tokens = sum(each.output_tokens for each in whole)
    if not tokens:
        return math.inf
    failed = len(records) - len(whole)
    slowest = max(each.e2e for each in whole)
    return (sum(each.e2e for each in whole) + failed * slowest) / tokens
