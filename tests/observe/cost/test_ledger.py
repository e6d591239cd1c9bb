"""The cost ledger over events written by hand."""

from __future__ import annotations

from itertools import islice

import pytest

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.embedding import Embedded, EmbeddingSlice, SlicedCall
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
from headrace.lab.plan.capacity import Demand, Settings, Slo, best_steady, demand
from headrace.lab.plan.roofline import SHAPES, Replica, device
from headrace.lab.simulate.runner import from_calls
from headrace.lab.workload.population import calls, parse
from headrace.lab.workload.work import Synthesis
from headrace.observe.cost.ledger import MOST_DAYS, MOST_ENDED, NOTHING, CostLedger, Key
from headrace.observe.cost.prices import Pricing, TokenPrices
from headrace.wiring.simulation import make_fleet, roofline_machine

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


def sliced(began: float, ended: float, **tokens: int) -> EmbeddingSlice:
    """Calls of tenants with the same names."""
    return EmbeddingSlice(
        began, ended, tuple(SlicedCall(name, name, count) for name, count in tokens.items())
    )


def ended(call: str, tokens: int, rejected: RejectReason | None = None) -> Embedded:
    return Embedded(call, call, "embed", 1, tokens, tokens, 1.0, FinishReason.STOP, rejected)


def check(ledger: CostLedger, **parts: float) -> None:
    balance = ledger.balance()
    assert balance.error < 1e-9
    assert {name: getattr(balance, name) for name in parts} == pytest.approx(parts)


def test_slices_on_an_idle_device() -> None:
    ledger = CostLedger(Pricing(0.5), began=0.0)
    ledger.fold(sliced(10, 14, a=3, b=1), 14)
    ledger.fold(sliced(15, 16, a=1), 16)  # of an open call: what lies between is no idle time
    check(ledger, wall=16, attributed=5, idle=10, overhead=1)
    assert ledger.cost("a").device_seconds == pytest.approx(3 + 1)
    ledger.fold(ended("a", 4), 16)
    ledger.fold(ended("b", 1), 16)
    assert ledger.cost("a").total == pytest.approx(0.5 * 4)
    assert ledger.cost("b").total == pytest.approx(0.5 * 1)
    account = ledger.accounts[Key(0, "a", "default")]
    assert (account.requests, account.prompt_tokens, account.output_tokens) == (1, 4, 0)
    ledger.fold(sliced(20, 21, c=1), 21)
    check(ledger, wall=21, attributed=6, idle=14, overhead=1)


def test_slices_between_the_steps_of_a_request() -> None:
    ledger = CostLedger(Pricing(1.0), began=0.0)
    ledger.fold(arrived("r", 1), 4)
    ledger.fold(admitted("r"), 4)
    ledger.fold(stepped(2, ("r", 0, 4)), 4)
    ledger.fold(sliced(5, 7, a=9), 7)
    ledger.fold(finished("r"), 9)
    ledger.fold(stepped(8, ("r", 4, 1)), 9)
    check(ledger, wall=9, attributed=2 + 2 + 1, idle=1, overhead=1 + 1 + 1)
    assert ledger.cost("r").device_seconds == pytest.approx(3)
    assert ledger.cost("a").device_seconds == pytest.approx(2)


def test_a_slice_during_a_step_is_counted_once() -> None:
    ledger = CostLedger(Pricing(1.0), began=0.0)
    ledger.fold(arrived("r", 0), 3)
    ledger.fold(admitted("r"), 3)
    ledger.fold(sliced(1, 2, a=9), 2)  # the step is computed beside it
    ledger.fold(stepped(0, ("r", 0, 4)), 3)
    ledger.fold(sliced(2.5, 3, a=9), 3)  # told late
    check(ledger, wall=3, attributed=2, idle=0, overhead=1)


def test_prices_of_tokens_hold_for_embeddings_too() -> None:
    ledger = CostLedger(Pricing(tokens=TokenPrices(2e6, 1e6, 9e6)), began=0.0)
    ledger.fold(sliced(0, 1, a=7), 1)
    ledger.fold(ended("a", 7), 1)
    assert ledger.cost("a").total == pytest.approx(14)


def test_a_call_of_which_nothing_was_computed_costs_nothing() -> None:
    ledger = CostLedger(Pricing(1.0), began=0.0)
    ledger.fold(ended("a", 0, RejectReason.TENANT_LIMIT), 1)
    assert ledger.cost("a") == NOTHING
    assert not ledger.accounts


REPLICA = Replica(SHAPES["llama-3.1-8b"], device("H100-SXM"))
SETTINGS = Settings(max_num_seqs=64, max_num_batched_tokens=2048)


def spent(rate: float, count: int) -> tuple[CostLedger, int, Demand]:
    """The ledger of a simulated replica under so many requests per second, its output tokens, and the demand."""
    trace = list(
        islice(
            calls(
                [parse(f"tenant=one,rate={rate},prompt=uniform:100:300,answer=uniform:50:150")], count, seed=3
            ),
            count,
        )
    )
    plans = SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=2048)
    cache = CacheOptions()
    fleet = make_fleet(plans, cache, roofline_machine(REPLICA, cache, plans, 4096))
    (replica,) = fleet.replicas
    times = replica.engine.times
    assert times is not None
    ledger = CostLedger(Pricing(REPLICA.dollars_per_hour / 3600), lambda: times.coefficients)
    replica.watch(ledger)
    fleet.run(from_calls(trace, Synthesis()))
    asked = demand(trace)
    return ledger, sum(group.output_tokens for group in fleet.tally.groups), asked


def test_at_a_given_load() -> None:
    """The plan's price of a million output tokens is that of the whole device, idle or not."""
    ledger, output_tokens, asked = spent(rate=3.0, count=150)
    planned = REPLICA.dollars_per_hour / (3600 * asked.requests_per_second * asked.output_tokens)
    balance = ledger.balance()
    whole = ledger.pricing.device_second * (balance.attributed + balance.idle + balance.overhead)
    assert whole / output_tokens == pytest.approx(planned, rel=0.1)
    assert balance.idle > 0.0


def test_at_full_use() -> None:
    """The plan's arithmetic assumes slots that are always full, so it is a lower bound; the ledger comes close."""
    ledger, output_tokens, asked = spent(rate=300.0, count=900)
    steady = best_steady(REPLICA, asked, Slo(10.0, 1.0), SETTINGS)
    assert steady.sequences == 64
    planned = REPLICA.dollars_per_hour / (3600 * steady.requests_per_second * asked.output_tokens)
    attributed = ledger.pricing.device_second * ledger.balance().attributed
    assert planned < attributed / output_tokens < 1.25 * planned


def test_what_tokens_cost() -> None:
    """Measured prices of prompt and output tokens add up to what requests cost."""
    ledger, _, _ = spent(rate=30.0, count=300)
    prices = ledger.token_prices()
    account = next(iter(ledger.accounts.values()))
    tokens = prices.of(account.prompt_tokens, account.cached_tokens, account.output_tokens)
    assert tokens == pytest.approx(account.cost(ledger.pricing).total, rel=0.01)
    assert prices.output > prices.prompt > 0.0
