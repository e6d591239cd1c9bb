"""Cached answers that may not be served are drafts of the answer that is computed instead."""

import asyncio

import pytest

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.prediction import CachedAnswerProposer
from headrace.core.events import Verified
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.tags import tenant_tag
from tests.doubles.cached_services import house, truth


def drafter():
    return BudgetedDrafter([CachedAnswerProposer(4)], Acceptance(), DraftBudget(4))


def accepted(h) -> tuple[int, int]:
    """Tokens drafted and accepted so far."""
    events = h.events(Verified)
    return sum(event.drafted for event in events), sum(event.accepted for event in events)


@pytest.mark.parametrize(
    ("age", "control"),
    [
        (1, CacheDirectives(no_cache=True)),
        (30, CacheDirectives(max_age=10)),
        (110, CacheDirectives()),  # it has expired, and would be served to who accepts that
    ],
)
def test_an_answer_that_may_not_be_served_is_a_draft(age, control):
    async def run():
        async with house(drafter=drafter()) as h:
            kept = CacheDirectives(stale_while_revalidate=60)
            assert await h.answer(24, control=kept) == ("miss", truth(24))
            assert accepted(h) == (0, 0)
            h.clock.now += age
            assert await h.answer(24, control=control) == ("miss", truth(24))
            drafted, right = accepted(h)
            assert drafted == right
            assert right >= 16

    asyncio.run(run())


def test_another_length_is_drafted_from_nothing():
    async def run():
        async with house(drafter=drafter()) as h:
            await h.answer(24)
            await h.answer(24, prompt=(7, 8, 9))
            assert accepted(h) == (0, 0)

    asyncio.run(run())


def test_a_cleared_answer_is_no_draft():
    async def run():
        async with house(drafter=drafter()) as h:
            await h.answer(24)
            await h.lookup.clear(tenant_tag("default"))
            await h.answer(24, control=CacheDirectives(no_cache=True))
            assert accepted(h) == (0, 0)

    asyncio.run(run())
