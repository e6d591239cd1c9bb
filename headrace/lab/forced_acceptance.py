"""Drafts that are accepted with a given probability, for measurements with any weights.

The answers of a first run without drafts are the truth, because drafts change no answer (greedy, or with seeds). In
later runs of the same requests each drafted token is the true one with probability ``rate``, else another one. So the
whole path of drafting and verifying is measured, and only the acceptance is set.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from headrace.core.drafting.proposal import DraftAsk, Proposal
from headrace.core.request import Request


class ForcedAcceptance:
    """A `core.drafting.proposal.Proposer` of tokens that are right with probability ``rate``.

    Args:
        answers: the answers of a run without drafts, by prompt.
        rate: the probability that a drafted token is right if all before it are.
        most: the longest proposal in tokens.
        seed: decides which tokens are right.
    """

    name = "forced"

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], rate: float, most: int, seed: int = 0
    ) -> None:
        self._answers = answers
        self._rate = rate
        self._most = most
        self._random = random.Random(seed)

    def propose(self, asks: Sequence[DraftAsk]) -> Sequence[Proposal | None]:
        """One proposal for each ask whose answer goes on."""
        return [self._propose(ask) for ask in asks]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Nothing is kept."""

    def _propose(self, ask: DraftAsk) -> Proposal | None:
        prompt = ask.request.tokens
        answer = self._answers.get(prompt)
        begun = len(ask.tokens) - len(prompt)
        if answer is None:
            return None
        most = min(self._most + ask.ahead, ask.most)
        true = answer[begun : begun + most]
        if not true:
            return None
        tokens = [
            token if at < ask.ahead or self._random.random() < self._rate else token ^ 1
            for at, token in enumerate(true)
        ]
        return Proposal(tuple(tokens), (self._rate,) * len(tokens), self.name)
