"""``headrace plan`` and the cost ledger agree about what tokens cost."""

from __future__ import annotations

from itertools import islice

import pytest

from headrace.config import CacheOptions, SchedulerOptions
from headrace.lab.plan.capacity import Demand, Settings, Slo, best_steady, demand
from headrace.lab.plan.roofline import SHAPES, Replica, device
from headrace.lab.simulate.runner import from_calls
from headrace.lab.workload.call import Synthesis
from headrace.lab.workload.population import calls, parse
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.wiring.simulation import make_fleet, roofline_machine

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
    ledger, output_tokens, asked = spent(rate=3.0, count=600)
    planned = REPLICA.dollars_per_hour / (3600 * asked.requests_per_second * asked.output_tokens)
    balance = ledger.balance()
    whole = ledger.pricing.device_second * (balance.attributed + balance.idle + balance.overhead)
    assert whole / output_tokens == pytest.approx(planned, rel=0.1)
    assert balance.idle > 0.0


def test_at_full_use() -> None:
    """The plan's arithmetic assumes slots that are always full, so it is a lower bound; the ledger comes close."""
    ledger, output_tokens, asked = spent(rate=300.0, count=1500)
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
