"""Drafts that are accepted with a given probability: for measurements with any weights, and for simulations.

The outputs are known from a simulation, or from a first run without drafts (drafts do not change greedy or seeded
outputs). In later runs, each drafted token is correct with the probability in ``rates`` and wrong otherwise. Drafting
and verification run in full; only the acceptance rate is fixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.core.drafting.costly_sources import INITIAL_CONFIDENCE
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request

Cost = Callable[[Sequence[DraftRow]], float]
"""Seconds that drafting one token for each of some rows takes."""


class Speculation(NamedTuple):
    """Drafts of a simulation: the acceptance rate by position (the last one holds for all later positions), and
    ``cost``, the time to draft one token as a share of a step of the target model (0: n-gram lookup).
    """

    rates: tuple[float, ...]
    cost: float = 0.0


class BadRates(ValueError):
    """Acceptance rates outside 0 to 1."""


def rates_of(text: str) -> tuple[float, ...]:
    """Acceptance by position from text: ``0.7``, or ``0.8,0.6,0.5`` for the first, second and each later token.

    Raises:
        BadRates: the text is something else.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise BadRates(f"expected numbers from 0 to 1 such as 0.7 or 0.8,0.6,0.5, got {text!r}")
    return rates


def measured_rates(positions: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Acceptance rate by position, from pairs of drafted and accepted token counts; empty without drafts."""
    most = max((drafted for drafted, _ in positions), default=0)
    tried = [sum(drafted > at and accepted >= at for drafted, accepted in positions) for at in range(most)]
    right = [sum(accepted > at for _, accepted in positions) for at in range(most)]
    return tuple(r / t for r, t in zip(right, tried, strict=True) if t)


def expected_tokens(rates: Sequence[float], count: int) -> float:
    """Mean number of tokens that a step generates when it verifies ``count`` drafted tokens."""
    tokens = survival = 1.0
    for at in range(count):
        survival *= rates[min(at, len(rates) - 1)]
        tokens += survival
    return tokens


class ForcedAcceptance:
    """A `core.drafting.proposal.CostlyProposer` whose tokens are correct with given probabilities.

    Args:
        answers: the outputs of a run without drafts, by ``key``.
        rates: the probability that a drafted token is correct if all tokens before it are. Several values apply by
            position; the last one holds for all later positions.
        most: maximum length of a proposal in tokens.
        seed: seed of the random choice of correct tokens.
        key: returns the key of a request's output (default: its prompt).
        cost: seconds of one drafting pass, which drafts a token for each of its rows (default: none). With a cost,
            proposals report a typical confidence, and the engine learns their acceptance rate.
        share: the first estimate of these seconds, as a share of a step of the target model for the same rows.
    """

    name = "forced"

    def __init__(
        self,
        answers: Mapping[Any, Sequence[int]],
        rates: float | Sequence[float],
        most: int,
        seed: int = 0,
        *,
        key: Callable[[Request], Any] = lambda request: request.tokens,
        cost: Cost | None = None,
        share: float = 0.0,
    ) -> None:
        self.seconds = 0.0
        self.most = most
        self.cost = cost
        self.share = share
        self._answers = answers
        self._rates = (rates,) if isinstance(rates, float | int) else tuple(rates)
        self._random = random.Random(seed)
        self._key = key

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """One proposal per request; None where the output has ended or is unknown."""
        proposals = [self._propose(draft_row) for draft_row in draft_rows]
        if self.cost is not None:
            counts = [len(each.tokens) if each else 0 for each in proposals]
            for at in range(max(counts, default=0)):
                drafting = [
                    draft_row for draft_row, count in zip(draft_rows, counts, strict=True) if count > at
                ]
                self.seconds += self.cost(drafting)
        return proposals

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Does nothing: the proposer keeps no state per request."""

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        prompt = draft_row.request.tokens
        answer = self._answers.get(self._key(draft_row.request))
        begun = len(draft_row.tokens) - len(prompt)
        if answer is None:
            return None
        most = min(self.most + draft_row.in_flight, draft_row.max_tokens)
        true = answer[begun : begun + most]
        if not true:
            return None
        rates = [
            self._rates[min(max(0, at - draft_row.in_flight), len(self._rates) - 1)]
            for at in range(len(true))
        ]
        tokens = [
            token if at < draft_row.in_flight or self._random.random() < rate else token ^ 1
            for at, (token, rate) in enumerate(zip(true, rates, strict=True))
        ]
        confidences = tuple(rates) if self.cost is None else (INITIAL_CONFIDENCE,) * len(tokens)
        return Proposal(tuple(tokens), confidences, self.name)
