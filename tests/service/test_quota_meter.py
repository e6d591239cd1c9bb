from __future__ import annotations

from dataclasses import replace

from headrace.core.events import AdmitReason, Admitted, Finished
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.tenancy.quota import Limit
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
