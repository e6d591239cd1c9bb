from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.api.compile.bodies import CompletionBody
from headrace.api.compile.policies import Rules
from headrace.api.compile.submit import Scheduling, retentions, scheduling_of
from headrace.api.errors import ApiError
from headrace.core.request import NO_SLO, Retention, Slo
from headrace.core.tenancy.classes import DEFAULT, FLEX, PRIORITY
from headrace.core.tenancy.tenants import Tenants, TenantTerms

ACME = TenantTerms(default_class="flex", classes=frozenset({"default"}))
TENANTS = Tenants({"acme": ACME})
CLASSES = {
    "default": replace(DEFAULT, slo=Slo(5.0, 0.2)),
    "priority": replace(PRIORITY, slo=Slo(1.0, 0.1)),
    "flex": FLEX,
}


def body(**given) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x"} | given)


def asked(tenant: str = "anybody", policy: str = "fair", **given) -> Scheduling:
    return scheduling_of(body(**given), Rules(policy, CLASSES, TENANTS), tenant, 60.0)


@pytest.mark.parametrize(
    ("given", "service_class", "priority"),
    [
        ({}, "default", 0),
        ({"service_tier": "auto"}, "default", 0),
        ({"service_tier": "flex"}, "flex", 0),
        ({"priority": 3}, "flex", 3),
        ({"priority": -1}, "priority", -1),
        ({"priority": 0}, "default", 0),
        ({"service_tier": "priority", "priority": 7}, "priority", 7),
        ({"service_tier": "auto", "priority": 7}, "default", 7),
    ],
)
def test_a_tier_names_the_class_and_priority_orders_within(given, service_class, priority):
    assert asked(**given)[:2] == (service_class, priority)


@pytest.mark.parametrize(
    ("given", "number"), [({}, 0), ({"priority": 3}, 3), ({"service_tier": "flex"}, 100)]
)
def test_where_numbers_alone_decide_a_tier_is_a_number(given, number):
    assert asked(policy="priority", **given).priority == number


def test_a_request_without_a_class_gets_the_tenants_default():
    assert asked("acme").service_class == "flex"
    assert asked("acme", service_tier="auto").service_class == "flex"
    assert asked("acme", service_tier="default").service_class == "default"


@pytest.mark.parametrize(
    ("given", "param"), [({"service_tier": "priority"}, "service_tier"), ({"priority": -5}, "priority")]
)
def test_a_class_that_is_not_the_tenants_is_refused(given, param):
    with pytest.raises(ApiError, match="'acme' may use default, flex, not priority") as error:
        asked("acme", **given)
    assert error.value.param == param


@pytest.mark.parametrize("policy", ["fcfs", "static"])
@pytest.mark.parametrize("given", [{"priority": 1}, {"service_tier": "flex"}, {"slo": {"ttft_ms": 5}}])
def test_what_nothing_would_come_of_is_refused(policy, given):
    with pytest.raises(ApiError, match="--scheduling-policy") as error:
        asked(policy=policy, **given)
    assert error.value.param == next(iter(given))
    neutral = asked("acme", policy=policy, priority=0, service_tier="auto", slo={}, deadline_ms=5)
    assert neutral == Scheduling("default", 0, Slo(5.0, 0.2), 0.005)


def test_an_slo_is_the_classes_where_it_says_nothing():
    assert asked().slo == Slo(5.0, 0.2)
    assert asked(slo={"ttft_ms": 250}).slo == Slo(0.25, 0.2)
    assert asked(service_tier="priority", slo={"tpot_ms": 20}).slo == Slo(1.0, 0.02)
    assert asked(service_tier="flex").slo == NO_SLO


def test_a_deadline_is_not_after_the_servers_own():
    assert asked().seconds is None
    assert asked(deadline_ms=1500).seconds == 1.5
    with pytest.raises(ApiError, match="at most 60000"):
        asked(deadline_ms=60_001)


def test_retention_becomes_the_cores():
    given = body(retention=[{"end": 5, "priority": 90}, {"start": 5, "priority": 0, "ttl_seconds": 60}])
    assert retentions(given, 8) == (Retention(0, 5, 90), Retention(5, None, 0, 60.0))
    assert retentions(body(), 8) == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"start": 4, "end": 4}, "retention[0].end"),
        ({"start": 8}, "retention[0].start"),
        ({"end": 9}, "retention[0].end"),
    ],
)
def test_a_range_lies_within_the_prompt(given, param):
    with pytest.raises(ApiError) as error:
        retentions(body(retention=[{"priority": 1} | given]), 8)
    assert error.value.param == param
