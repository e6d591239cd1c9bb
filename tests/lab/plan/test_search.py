from __future__ import annotations

import dataclasses

import pytest

from headrace.lab.plan.capacity import Demand, Settings, Slo, split_steady
from headrace.lab.plan.roofline import A100, BFLOAT16, CPU, H100, SHAPES, Replica
from headrace.lab.plan.search import Fleet, Trial, candidates, cheapest, prefill_replicas

EIGHT_B = SHAPES["llama-3.1-8b"]
SLO = Slo(ttft=2.0, tpot=0.05, share=0.95)


def chat(rate: float) -> Demand:
    return Demand(rate, 1000, 1000, 200, 1100, 2000, (1000,))


def enough(needed: dict[str, int]):
    """A fake simulation: a fleet of the device with so many devices meets the targets."""

    def confirm(fleet: Fleet) -> Trial:
        least = needed.get(fleet.replica.device.name, 10_000)
        return Trial(1.0 if fleet.devices >= least else 0.9 * fleet.devices / least, 1.0, 0.02, 1000.0, 0)

    return confirm


def search(devices, rate, needed, max_devices=64):
    demand = chat(rate)
    possible, refused = candidates(EIGHT_B, devices, BFLOAT16, demand, SLO)
    return cheapest(possible, refused, demand, SLO, enough(needed), max_devices)


@pytest.mark.parametrize("needed", [1, 2, 3, 4, 7, 12, 13, 64])
def test_the_fewest_replicas_are_found_from_what_arithmetic_needs_at_least(needed):
    verdict = search([H100], rate=40.0, needed={"H100-SXM": needed})
    least = min(fleet.devices for fleet, _ in verdict.tried)
    assert least > 1  # one would have an ever longer queue
    assert verdict.best.devices == max(least, needed)
    assert verdict.trial.attained == 1.0
    assert len({fleet for fleet, _ in verdict.tried}) == len(verdict.tried)


def test_a_fleet_in_two_pools_has_at_least_one_replica_of_each():
    assert [prefill_replicas(count, 0.25) for count in (2, 3, 8, 100)] == [1, 1, 2, 25]
    assert [prefill_replicas(count, 0.875) for count in (2, 8)] == [1, 7]
    assert prefill_replicas(5, 0.0) == 0


def test_candidates_in_two_pools_are_near_the_balanced_share():
    possible, _ = candidates(EIGHT_B, [H100], BFLOAT16, chat(40.0), SLO, split=True)
    apart = [each for each in possible if each.prefill_share and each.replica.degree == 1]
    steady, balanced = split_steady(Replica(EIGHT_B, H100), chat(40.0), SLO, Settings(1024, 8192))
    below, above = sorted(each.prefill_share for each in apart)
    assert below < balanced < above == below + 1 / 8
    best = max(each.steady.requests_per_second for each in possible if each.replica.degree == 1)
    assert all(each.steady.requests_per_second <= best for each in apart)
    assert all(each.steady.requests_per_second < steady.requests_per_second for each in apart), (
        "beside the balanced share, one kind of replica waits for the other"
    )
    assert not any(each.prefill_share for each in candidates(EIGHT_B, [H100], BFLOAT16, chat(40.0), SLO)[0])


def test_the_cheaper_of_two_devices_that_do_the_same_is_taken():
    dear = dataclasses.replace(H100, name="dear", dollars_per_hour=2 * H100.dollars_per_hour)
    verdict = search([dear, H100], rate=4.0, needed={"dear": 1, "H100-SXM": 1})
    assert verdict.best.replica.device is H100
    assert verdict.best.devices == 1


def test_the_dearer_device_is_taken_where_fewer_of_it_cost_less():
    verdict = search([A100, H100], rate=30.0, needed={"A100-80G": 6, "H100-SXM": 2})
    assert verdict.best.replica.device is H100
    assert verdict.best.dollars_per_hour == 2 * H100.dollars_per_hour
    assert all(fleet.dollars_per_hour < 6 * A100.dollars_per_hour for fleet, _ in verdict.tried)


def test_none_that_fits_comes_with_every_reason():
    verdict = search([A100, CPU], rate=30.0, needed={}, max_devices=8)
    assert verdict.best is None
    reported = "\n".join(verdict.refused)
    assert "cpu: a single stream takes" in reported
    assert "1 x A100-80G, 2048 batched tokens: 8 replicas serve 0.1 % of the requests within SLO" in reported
    assert len(set(verdict.refused)) == len(verdict.refused)


def test_a_load_far_beyond_all_devices_is_not_even_simulated():
    verdict = search([A100], rate=10_000.0, needed={}, max_devices=8)
    assert verdict.best is None
    assert not verdict.tried
    assert "8 fit in 8 devices" in verdict.refused[0]


def test_a_model_too_large_for_one_device_is_spread_over_several():
    demand = chat(1.0)
    possible, refused = candidates(SHAPES["llama-3.1-70b"], [A100], BFLOAT16, demand, SLO)
    assert {each.replica.degree for each in possible} <= {2, 4, 8}
    assert any("weights of 141.1 GB" in reason for reason in refused)


def test_a_promise_to_all_is_kept_whatever_floats_make_of_it():
    demand = chat(1.0)
    possible, refused = candidates(EIGHT_B, [H100], BFLOAT16, demand, SLO)
    almost = 1.0 - 2**-53
    verdict = cheapest(
        possible, refused, demand, Slo(2.0, 0.05, 1.0), lambda fleet: Trial(almost, 1.0, 0.02, 1.0, 0), 8
    )
    assert verdict.best is not None
