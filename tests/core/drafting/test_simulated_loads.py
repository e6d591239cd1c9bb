"""Loads in which drafts are right by chance: the automatic length is never much slower than none, and near the best."""

import random
from collections.abc import Sequence

import pytest

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import DraftRow, Proposal, StepLoad
from headrace.core.request import Request
from tests.core.drafting.test_draft_budget import OnTheLine

MOST = 8
OUTPUT = 80
STEPS = 200
LENGTHS = (1, 2, 4, 8)


class Chances:
    """Every token of an answer is 1; a drafted token is 1 with the chance of its request, whatever it claims."""

    name = "chance"

    def __init__(self, chances: dict[str, float], claimed: float) -> None:
        self._chances = chances
        self._claimed = claimed
        self._rng = random.Random(7)

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        proposals: list[Proposal | None] = []
        for draft_row in draft_rows:
            chance = self._chances[draft_row.request.id]
            tokens = tuple(int(self._rng.random() < chance) for _ in range(min(MOST, draft_row.max_tokens)))
            proposals.append(Proposal(tokens, (self._claimed,) * len(tokens), self.name))
        return proposals

    def ended(self, request: Request, tokens: list[int]) -> None:
        pass


def throughput(rows: int, mix: Sequence[float], token: float, claimed: float, fixed: int | None) -> float:
    """Tokens per second while always ``rows`` requests run, whose chances follow ``mix``; ``fixed`` 0: no drafts."""
    times = OnTheLine()
    times._coefficients = [0.020, 0.0002, token, 1e-7]
    chances: dict[str, float] = {}
    drafter = BudgetedDrafter([Chances(chances, claimed)], Acceptance(), DraftBudget(fixed))
    running: list[tuple[Request, list[int]]] = []
    begun: dict[str, int] = {}
    seconds = drawn = 0.0
    for step in range(STEPS):
        while len(running) < rows:
            name, chance = str(len(chances)), mix[len(chances) % len(mix)]
            chances[name], begun[name] = chance, step
            running.append((Request(name, (1,), tenant=f"{chance:g}"), [1]))
        contexts = sum(len(tokens) for _, tokens in running)
        load = StepLoad(rows, rows, contexts, 10_000, times, step)
        draft_rows = [
            DraftRow(request, tokens, MOST, 0, len(tokens) / (step - begun[request.id] + 1))
            for request, tokens in running
        ]
        drafts = drafter.draft(draft_rows, load) if fixed != 0 else [None] * rows
        extra = 0
        for (_, tokens), draft in zip(running, drafts, strict=True):
            proposed = draft.tokens if draft else ()
            right = next((at for at, each in enumerate(proposed) if each != 1), len(proposed))
            tokens += [1] * (right + 1)
            drawn += right + 1
            extra += len(proposed)
        seconds += times.predict(rows, rows + extra, contexts)
        for request, tokens in running:
            if len(tokens) > OUTPUT:
                drafter.ended(request, tokens)
        running = [each for each in running if len(each[1]) <= OUTPUT]
    return drawn / seconds


@pytest.mark.parametrize("rows", [1, 8, 48])
@pytest.mark.parametrize("token", [0.0003, 0.0015])
@pytest.mark.parametrize("mix", [(0.0,), (0.02, 0.1), (0.0, 0.0, 0.9), (0.8,)], ids=str)
def test_never_slower_and_near_the_best(mix: Sequence[float], token: float, rows: int) -> None:
    automatic = throughput(rows, mix, token, 0.6, None)
    off = throughput(rows, mix, token, 0.6, 0)
    assert automatic >= 0.98 * off
    assert automatic >= 0.95 * max(throughput(rows, mix, token, 0.6, length) for length in LENGTHS)


@pytest.mark.parametrize("claimed", [0.1, 0.99])
def test_a_source_that_errs_about_itself_costs_little(claimed: float) -> None:
    for mix in ((0.0,), (0.8,)):
        automatic = throughput(8, mix, 0.001, claimed, None)
        assert automatic >= 0.98 * throughput(8, mix, 0.001, claimed, 0)
        assert automatic >= 0.9 * throughput(8, mix, 0.001, claimed, 4)


def test_rows_that_differ_are_better_served_than_by_any_common_length() -> None:
    mix = (0.0, 0.0, 0.95)
    automatic = throughput(16, mix, 0.001, 0.7, None)
    fixed = max(throughput(16, mix, 0.001, 0.7, length) for length in (0, *LENGTHS))
    assert automatic >= 1.05 * fixed, (
        "as much as the rows without drafts allow, which wait a tenth longer at most"
    )
