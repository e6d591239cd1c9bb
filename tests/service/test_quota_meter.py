from __future__ import annotations

import math
from dataclasses import replace

from headrace.core.events import AdmitReason, Admitted, Finished
from headrace.core.request import FinishReason, RejectReason, Request, SamplingParams
from headrace.core.tenancy.gate import Limits, Load, Reject, decide
from headrace.core.tenancy.kv_limits import KvBounds
from headrace.core.tenancy.quota import Limit, Shortage
from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms
from headrace.service.quota_meter import UNSTATED_ANSWER_TOKENS, QuotaMeter

LIMITS = TenantLimits(requests_per_minute=9, tokens_per_minute=10_000, concurrent_requests=9)


def metered() -> QuotaMeter:
    return QuotaMeter(Tenants({"acme": TenantTerms(limits=LIMITS)}), "m")


def requests(*names: str, max_tokens: int | None = 5) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [Request(name, (1, 2, 3), params, tenant="acme") for name in names]


def left(meter: QuotaMeter) -> tuple[int, int, int]:
    rooms = meter.rooms("acme", 1.0)
    kinds = (Limit.REQUESTS_PER_MINUTE, Limit.TOKENS_PER_MINUTE, Limit.CONCURRENT_REQUESTS)
    return tuple(rooms[kind].remaining for kind in kinds)  # type: ignore[return-value]


def end(meter: QuotaMeter, name: str, cached: int, output: int) -> None:
    meter.fold(Finished(name, FinishReason.STOP, 3, output, cached), 1.0)


def test_a_call_is_one_request_and_settled_when_its_last_sequence_has_ended() -> None:
    meter = metered()
    meter.enter(requests("a", "b"), 0.0)
    assert left(meter) == (8, 10_000 - 16, 8)
    for name in ("a", "b"):
        meter.fold(Admitted(name, AdmitReason.NEW, 0, 3), 0.5)
    end(meter, "a", 0, 2)
    assert left(meter) == (8, 10_000 - 16, 8)
    end(meter, "b", 2, 1)
    assert left(meter) == (8, 10_000 - (3 + 2) - (1 + 1), 9)


def test_what_was_never_admitted_has_used_nothing() -> None:
    meter = metered()
    meter.enter(requests("a"), 0.0)
    end(meter, "a", 0, 0)
    assert left(meter) == (8, 10_000, 9)


def test_a_call_without_max_tokens_is_charged_an_estimate_and_corrected_at_its_end() -> None:
    meter = metered()
    meter.enter(requests("a", max_tokens=None), 0.0)
    assert left(meter)[1] == 10_000 - 3 - UNSTATED_ANSWER_TOKENS
    meter.fold(Admitted("a", AdmitReason.NEW, 0, 3), 0.5)
    end(meter, "a", 0, 4000)
    assert left(meter)[1] == 10_000 - 4003


def test_what_an_answer_is_known_to_begin_with_is_not_charged() -> None:
    meter = metered()
    meter.enter([replace(request, answered=(7, 8, 9)) for request in requests("a")], 0.0)
    meter.fold(Admitted("a", AdmitReason.NEW, 3, 6), 0.5)
    end(meter, "a", 3, 5)
    assert left(meter)[1] == 10_000 - 2


def test_unmetered_requests_are_ignored() -> None:
    meter = metered()
    meter.fold(Admitted("x", AdmitReason.NEW, 0, 3), 0.5)
    end(meter, "x", 0, 4)
    meter.enter([Request("y", (1,), tenant="free")], 0.0)
    assert meter.rooms("free", 0.0) == {}


def test_a_request_that_alone_exceeds_a_bound_on_kv_memory_is_refused_for_ever() -> None:
    meter = QuotaMeter(model="m", kv=KvBounds({"acme": 10}, None, {"flex": 6}), max_model_len=100)
    assert meter.shortage(requests("a", max_tokens=7), 0.0) is None
    assert (
        meter.shortage(requests("a", "b", "c", max_tokens=7), 0.0) is None
    )  # each fits; they wait for each other
    short = meter.shortage(requests("a", max_tokens=8), 0.0)
    assert short == Shortage(Limit.KV_TOKENS, 10, 0, 11, math.inf)
    assert meter.shortage(requests("a", max_tokens=None), 0.0) == Shortage(
        Limit.KV_TOKENS, 10, 0, 100, math.inf
    )
    (flex,) = (replace(each, service_class="flex") for each in requests("a", max_tokens=4))
    assert meter.shortage([flex], 0.0) == Shortage(Limit.CLASS_KV_TOKENS, 6, 0, 7, math.inf)
    other = replace(requests("a", max_tokens=90)[0], tenant="other")
    assert meter.shortage([other], 0.0) is None
    background = replace(requests("a", max_tokens=90)[0], service_class="background")
    assert meter.shortage([background], 0.0) is None
    verdict = decide(Load(0, 0, 0.0, False), 1, 3, Limits(9, 99), short)
    assert isinstance(verdict, Reject)
    assert verdict.reason is RejectReason.TOO_LARGE
    assert "may hold 11 tokens of KV memory" in verdict.message
    assert "the limit of its tenant is 10" in verdict.message


def test_bounds_on_kv_memory_are_replaced_with_the_tenants() -> None:
    meter = QuotaMeter(model="m", max_model_len=100)
    assert meter.shortage(requests("a"), 0.0) is None
    meter.replace(Tenants(), KvBounds({}, 5, {}))
    assert meter.shortage(requests("a"), 0.0) == Shortage(Limit.KV_TOKENS, 5, 0, 8, math.inf)
