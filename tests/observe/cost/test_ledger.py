"""The cost ledger over events written by hand."""

from __future__ import annotations

import pytest

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Emitted,
    Finished,
    Stepped,
    StepRows,
    TurnedAway,
)
from headrace.core.plan import Row
from headrace.core.request import FinishReason, RejectReason
from headrace.observe.cost.account import NOTHING, Key
from headrace.observe.cost.ledger import MOST_DAYS, MOST_ENDED, CostLedger
from headrace.observe.cost.prices import Pricing, TokenPrices

DAY = 86_400.0


def arrived(request: str, at: float, tenant: str = "a", prompt: int = 4) -> Arrived:
    return Arrived(request, prompt, tenant, 0, at)


def admitted(request: str, cached: int = 0, known: int = 4) -> Admitted:
    return Admitted(request, AdmitReason.NEW, cached, known)


def stepped(began: float, *rows: tuple[str, int, int], decodes: int | None = None) -> Stepped:
    """Rows as (request, start, length); decode rows first."""
    ones = sum(length == 1 for _, _, length in rows) if decodes is None else decodes
    work = StepRows(
        began,
        tuple(request for request, _, _ in rows),
        tuple(Row(slot, start, length, (), True) for slot, (_, start, length) in enumerate(rows)),
    )
    tokens = sum(length for _, _, length in rows)
    return Stepped(0, ones, len(rows) - ones, tokens, 0, 0, 0, 1, 0, 0, work)


def finished(request: str, output: int = 1) -> Finished:
    return Finished(request, FinishReason.LENGTH, 4, output, 0)


def one_request(ledger: CostLedger, request: str, at: float, tenant: str = "a") -> None:
    """A request that arrives, waits a second, computes for two and ends."""
    ledger.fold(arrived(request, at, tenant), at + 3)
    ledger.fold(admitted(request), at + 3)
    ledger.fold(Emitted(request, (7,)), at + 3)
    ledger.fold(finished(request), at + 3)
    ledger.fold(stepped(at + 1, (request, 0, 4)), at + 3)


def test_the_wall_clock_is_idle_time_overhead_and_steps() -> None:
    ledger = CostLedger(Pricing(0.5), began=10.0)
    one_request(ledger, "x", 14.0)
    one_request(ledger, "y", 20.0)
    assert ledger.balance() == (13.0, 4.0, 7.0, 2.0)
    assert ledger.balance(25.0) == (15.0, 4.0, 9.0, 2.0)
    assert ledger.balance().error == 0.0
    assert ledger.cost("x") == (1.0, 1.0, 0.0, 2.0)


def test_an_empty_ledger() -> None:
    ledger = CostLedger(Pricing(0.5), began=10.0)
    assert ledger.balance() == (0.0, 0.0, 0.0, 0.0)
    assert ledger.balance(12.0) == (2.0, 0.0, 2.0, 0.0)
    assert ledger.balance().error == 0.0
    assert ledger.cost("nobody") == NOTHING


def test_rows_of_a_step_share_its_seconds() -> None:
    ledger = CostLedger(Pricing(1.0))
    for request, tenant in (("x", "a"), ("y", "b")):
        ledger.fold(arrived(request, 0.0, tenant), 1.0)
        ledger.fold(admitted(request), 1.0)
    ledger.fold(stepped(0.0, ("x", 4, 1), ("y", 0, 3)), 4.0)
    assert ledger.cost("x").total == 1.0
    assert ledger.cost("y").total == 3.0
    assert ledger.accounts[Key(0, "b", "default")].seconds == 3.0
    assert ledger.kinds == {"prefill": 0.0, "decode": 0.0, "mixed": 4.0}


def test_drafted_positions_count_for_their_row() -> None:
    ledger = CostLedger(Pricing(1.0))
    for request in ("x", "y"):
        ledger.fold(arrived(request, 0.0), 1.0)
        ledger.fold(admitted(request), 1.0)
    ledger.fold(stepped(0.0, ("x", 4, 1), ("y", 4, 3), decodes=2), 4.0)
    assert ledger.cost("y").total == 3.0
    assert ledger.kinds["decode"] == 4.0


def test_steps_that_overlap_count_once() -> None:
    """With overlap 1, a step is planned while the one before it computes."""
    ledger = CostLedger(Pricing(1.0))
    ledger.fold(arrived("x", 0.0), 1.0)
    ledger.fold(admitted("x"), 1.0)
    ledger.fold(stepped(0.0, ("x", 0, 4)), 2.0)
    ledger.fold(stepped(1.0, ("x", 4, 1)), 3.0)
    assert ledger.cost("x").device_seconds == 3.0
    assert ledger.balance() == (3.0, 3.0, 0.0, 0.0)


def test_a_row_that_ends_after_its_request_is_paid_by_it() -> None:
    ledger = CostLedger(Pricing(1.0))
    one_request(ledger, "x", 0.0)
    ledger.fold(stepped(2.0, ("x", 4, 1)), 5.0)
    assert ledger.cost("x").device_seconds == 4.0
    assert ledger.balance() == (5.0, 4.0, 0.0, 1.0)


def test_a_request_that_never_runs_leaves_overhead() -> None:
    ledger = CostLedger(Pricing(1.0))
    ledger.fold(arrived("x", 1.0), 1.5)
    ledger.fold(Finished("x", FinishReason.CANCELLED, 4, 0, 0), 3.0)
    one_request(ledger, "y", 4.0)
    assert ledger.balance() == (7.0, 2.0, 2.0, 3.0)


def test_a_rejected_request_changes_nothing() -> None:
    ledger = CostLedger(Pricing(1.0))
    ledger.fold(TurnedAway("x", "a", "default", RejectReason.QUEUE_FULL), 5.0)
    ledger.fold(Finished("x", FinishReason.REJECTED, 4, 0, 0), 5.0)
    assert ledger.balance() == (0.0, 0.0, 0.0, 0.0)


def test_prices_of_tokens() -> None:
    ledger = CostLedger(Pricing(0.0, TokenPrices(1e6, 1e5, 1e7)))
    ledger.fold(arrived("x", 0.0), 1.0)
    assert ledger.cost("x").total == 0.0
    ledger.fold(admitted("x", cached=3), 1.0)
    ledger.fold(Emitted("x", (1, 2)), 1.0)
    assert ledger.cost("x").total == pytest.approx(1.0 + 0.3 + 20.0)
    assert ledger.token_prices() == TokenPrices(1e6, 1e5, 1e7)


def test_measured_prices_of_tokens() -> None:
    """Without configured prices, tokens cost what their rows took."""
    ledger = CostLedger(Pricing(2.0))
    ledger.fold(arrived("x", 0.0), 1.0)
    ledger.fold(admitted("x"), 1.0)
    ledger.fold(stepped(0.0, ("x", 0, 4)), 2.0)
    ledger.fold(Emitted("x", (1,)), 2.0)
    ledger.fold(stepped(2.0, ("x", 4, 1)), 5.0)
    ledger.fold(Emitted("x", (2,)), 5.0)
    assert ledger.token_prices() == pytest.approx((1e6, 0.0, 3e6))


def test_each_day_has_its_accounts() -> None:
    ledger = CostLedger(Pricing(1.0), clock_offset=5 * DAY)
    ledger.fold(arrived("x", DAY - 2.0), DAY - 1.0)
    ledger.fold(admitted("x"), DAY - 1.0)
    ledger.fold(stepped(DAY - 2.0, ("x", 0, 4)), DAY - 1.0)
    ledger.fold(stepped(DAY - 1.0, ("x", 4, 1)), DAY + 2.0)
    days = {key.day: account.seconds for key, account in ledger.accounts.items()}
    assert days == {5: 1.0, 6: 3.0}
    assert ledger.cost("x").device_seconds == 4.0


def test_old_days_are_added_up() -> None:
    ledger = CostLedger(Pricing(1.0))
    for day in range(MOST_DAYS + 10):
        one_request(ledger, f"r{day}", day * DAY)
    assert len(ledger.accounts) == MOST_DAYS
    assert ledger.balance().attributed == 2.0 * (MOST_DAYS + 10)


def test_ended_requests_are_forgotten_in_the_end() -> None:
    ledger = CostLedger(Pricing(1.0))
    for number in range(MOST_ENDED + 1):
        one_request(ledger, f"r{number}", 10.0 * number)
    assert ledger.cost("r0") == NOTHING
    assert ledger.cost("r1").device_seconds == 2.0


def test_the_time_of_draft_models_is_charged_to_the_rows_that_drafted() -> None:
    ledger = CostLedger(Pricing(0.5))
    for name in ("x", "y"):
        ledger.fold(arrived(name, 0.0), 0.0)
        ledger.fold(admitted(name), 0.0)
    step = stepped(0.0, ("x", 8, 1), ("y", 8, 1))
    ledger.fold(step._replace(work=step.work._replace(drafting=(0.0, 2.0))), 4.0)
    assert (ledger.cost("x").device_seconds, ledger.cost("y").device_seconds) == (1.0, 3.0)
    assert (ledger.draft_seconds_of("x"), ledger.draft_seconds_of("y")) == (0.0, 2.0)
    assert ledger.balance().error == 0.0


def test_no_more_drafting_is_charged_than_the_step_took() -> None:
    ledger = CostLedger(Pricing(0.5))
    ledger.fold(arrived("x", 0.0), 0.0)
    ledger.fold(admitted("x"), 0.0)
    step = stepped(0.0, ("x", 8, 1))
    ledger.fold(step._replace(work=step.work._replace(drafting=(9.0,))), 4.0)
    assert ledger.cost("x").device_seconds == ledger.draft_seconds_of("x") == ledger.draft_seconds == 4.0
