"""What the scheduler, the sessions and other servers get of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.api.compile.bodies import CompletionBody
from headrace.api.compile.markers import chosen
from headrace.api.compile.policies import (
    SESSION_RETENTION,
    STORED_RETENTION,
    About,
    KVSharing,
    PromptPolicy,
    Rules,
    session_of,
    session_of_stored,
    stored_name,
)
from headrace.api.compile.submit import Scheduling, retentions, scheduling_of
from headrace.api.errors import ApiError
from headrace.core.request import NO_SLO, Request, Retention, Slo
from headrace.core.tenancy.tenants import DEFAULT, FLEX, PRIORITY, Tenants, TenantTerms
from headrace.service.sessions import Turn
from tests.api.caching import RequestsNoted

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


PRODUCER = KVSharing("prefill-0", "10.0.0.5", 5000)


CONSUMER = KVSharing(peers=("10.0.0.5:5000",))


DECODE_THERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's proxies send it."""


@pytest.fixture
def options():
    return {"lookup": RequestsNoted}


def ask(house, sharing: KVSharing, params: object, status: int = 200, path: str = "completions", **fields):
    house.model.sharing = sharing
    prompt = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = prompt | {"max_tokens": 1, "kv_transfer_params": params} | fields
    answer = house.client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_answer_of_a_prefill_server_is_the_question_to_a_decode_server(house, path):
    answer = ask(house, PRODUCER, DECODE_THERE, path=path)["kv_transfer_params"]
    assert (answer["remote_host"], answer["remote_port"]) == ("10.0.0.5", 5000)
    assert answer["remote_engine_id"] == "prefill-0"
    assert house.lookup.requests[-1].retention == (Retention(0, None, 60, 60.0),), "until it has been pulled"
    assert house.lookup.requests[-1].peer == ""
    assert "kv_transfer_params" not in ask(house, CONSUMER, answer, path=path)
    assert house.lookup.requests[-1].peer == "10.0.0.5:5000"
    assert not house.lookup.requests[-1].follows
    ask(house, CONSUMER, answer | {"remote_prefill_runs": True}, path=path)
    assert house.lookup.requests[-1].follows


def test_nothing_is_said_where_nothing_is_asked(house):
    assert "kv_transfer_params" not in ask(house, PRODUCER, None)
    assert "kv_transfer_params" not in ask(house, PRODUCER, {})


@pytest.mark.parametrize(
    ("sharing", "params", "message"),
    [
        (CONSUMER, DECODE_THERE, "publishes no KV blocks"),
        (KVSharing(), DECODE_THERE, "publishes no KV blocks"),
        (PRODUCER, {"do_remote_decode": True, "do_remote_prefill": True}, "exclude each other"),
        (CONSUMER, {"do_remote_prefill": True}, "needs remote_host and remote_port"),
        (
            CONSUMER,
            {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 80},
            "has no peer evil:80",
        ),
        (CONSUMER, {"do_remote_prefill": True, "remote_block_ids": [1]}, "remote_block_ids"),
        (CONSUMER, {"remote_prefill_runs": True}, "remote_prefill_runs needs do_remote_prefill"),
        (CONSUMER, {"do_remote": True}, "do_remote"),
    ],
)
def test_what_is_refused(house, sharing, params, message):
    error = ask(house, sharing, params, status=400)["error"]
    assert message in error["message"]
    assert error["param"].startswith("kv_transfer_params")


def test_a_prompt_for_another_server_is_not_streamed(house):
    assert "cannot be streamed" in str(ask(house, PRODUCER, DECODE_THERE, status=400, stream=True))


class Reported:
    """Takes the requests of sessions."""

    def __init__(self):
        self.turns = []

    def enter(self, request, turn):
        self.turns.append((request.id, turn))


def test_a_tenants_own_markers_replace_the_servers():
    policy = PromptPolicy(chosen(["billing_header"]))
    tenants = Tenants(
        {"own": TenantTerms(normalize=frozenset({"git_status"})), "none": TenantTerms(normalize=frozenset())}
    )
    assert policy.markers(tenants, "other") == chosen(["billing_header"])
    assert policy.markers(tenants, "own") == chosen(["git_status"])
    assert policy.markers(tenants, "none") == ()


def test_a_session_retains_its_prompt_for_a_while():
    assert session_of(None, None, releases=False) is None
    assert session_of("", 5.0, releases=True) is None
    reported = session_of("s", None, releases=False)
    assert reported == (Turn("s"), Retention(0, None, SESSION_RETENTION, 300.0))
    reported = session_of("s", 7.0, releases=True)
    assert reported == (Turn("s", releases=True), Retention(0, None, SESSION_RETENTION, 7.0))


def test_a_stored_response_continues_the_session_of_the_previous_one():
    reported = session_of_stored("resp_2", "resp_1", 60.0)
    assert reported.turn == Turn(stored_name("resp_2"), stored_name("resp_1"))
    assert reported.retention == Retention(0, None, STORED_RETENTION, 60.0)
    assert session_of_stored("resp_1", None, 60.0).turn.continues == ""


def test_a_request_is_entered_if_there_is_a_listener():
    request, sessions, seen = Request("r", (1, 2)), Reported(), []
    PromptPolicy().submit(request, About(), session_of("s", None, releases=False))
    policy = PromptPolicy(enter=lambda *given: seen.append(given), sessions=sessions)
    about = About(tools=(5,), normalized=({"marker": "m"},))
    policy.submit(request, about, session_of("s", None, releases=False))
    policy.submit(request, about, None)
    assert sessions.turns == [("r", Turn("s"))]
    assert seen == 2 * [(request, about.place, (5,), ({"marker": "m"},), False)]
