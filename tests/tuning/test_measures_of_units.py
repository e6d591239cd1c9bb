import math

import pytest

from headrace.core.events import Arrived, Emitted, Finished, Layer, LookedUp, Lookup, Spared
from headrace.core.request import FinishReason
from headrace.tuning.measures import Assignment, By, UnitMeter


def meter(by=By.REQUEST, began=10.0):
    return UnitMeter(Assignment(by, 1, began, 30.0))


def request(meter, name, tenant="a", at=10.0, reason=FinishReason.STOP, service_class="default"):
    meter.fold(Arrived(name, 9, tenant, 0, at, service_class), at)
    meter.fold(Emitted(name, (1,)), at + 1.0)
    meter.fold(Emitted(name, (1, 2)), at + 2.0)
    meter.fold(Finished(name, reason, 9, 3, 0), at + 2.0)


def test_a_request_is_measured_when_it_ends():
    seen = meter()
    request(seen, "r")
    (unit,) = seen.take(20.0)
    shown = {name: math.exp(value) for name, value in unit.values.items() if not name.endswith("_share")}
    assert shown == {
        "ttft_mean_seconds": pytest.approx(1.0),
        "e2e_mean_seconds": pytest.approx(2.0),
        "normalized_latency_seconds": pytest.approx(2 / 3),
        "itl_mean_seconds": pytest.approx(0.5),
    }
    assert (unit.values["failed_share"], unit.values["cached_share"]) == (0.0, 0.0)
    assert unit.covariates == (pytest.approx(math.log(10)), 0.0)
    assert unit.treated == seen.assignment.treats("r")
    assert seen.take(20.0) == []


def test_what_ended_otherwise_counts_as_failed_or_not_at_all():
    seen = meter()
    request(seen, "timeout", reason=FinishReason.TIMEOUT)
    request(seen, "cancelled", reason=FinishReason.CANCELLED)
    request(seen, "batch", service_class="background")
    request(seen, "earlier", at=9.0)
    (unit,) = seen.take(20.0)
    assert unit.values == {"failed_share": 1.0, "cached_share": 0.0}


def test_a_cached_response_takes_the_time_of_its_lookup():
    seen = meter()
    seen.fold(LookedUp("r", Layer.EXACT, Lookup.MISS, 5.0), 20.0)
    seen.fold(LookedUp("r", Layer.SEMANTIC, Lookup.HIT, 0.5), 20.0)
    seen.fold(Spared("r", "a", Layer.SEMANTIC, 9, 4, 1.0), 20.0)
    seen.fold(Spared("joined", "a", Layer.COALESCED, 9, 4, 1.0), 20.0)
    hit, joined = seen.take(20.0)
    assert hit.values["cached_share"] == joined.values["cached_share"] == 1.0
    assert hit.values["e2e_mean_seconds"] == pytest.approx(math.log(0.5))
    assert "e2e_mean_seconds" not in joined.values


def test_a_tenant_is_measured_when_its_period_is_over_and_its_requests_have_ended():
    seen = meter(By.TENANT)
    request(seen, "r1", at=11.0)
    seen.fold(Arrived("late", 9, "a", 0, 39.0), 39.0)
    assert seen.take(50.0) == []
    seen.fold(Emitted("late", (1,)), 43.0)
    seen.fold(Finished("late", FinishReason.STOP, 9, 1, 0), 43.0)
    request(seen, "other", tenant="b", at=45.0)
    (unit,) = seen.take(50.0)
    assert unit.tenant == "a"
    assert unit.values["e2e_mean_seconds"] == pytest.approx((math.log(2) + math.log(4)) / 2)
    (other,) = seen.take(70.0)
    assert other.tenant == "b"
