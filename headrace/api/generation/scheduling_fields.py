"""Scheduling fields of a request, and the scheduler's parameters that they become.

```
 service_tier   auto: the tenant's own class; default, flex, priority: that class, if the tenant may use it
 priority       orders within the class; without service_tier its sign selects the class too
 slo            TTFT and TPOT targets in milliseconds; default: those of the class
 deadline_ms    milliseconds after which the request ends with 408
```
A field that the scheduling policy does not use is refused, because it would have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic import Field

from headrace.api.errors import invalid
from headrace.api.wire import Wire
from headrace.core.request import Retention, Slo
from headrace.core.tenancy.tenants import CLASSES, EQUALS, ServiceClass, Tenants, TenantTerms

MAX_MS = 86_400_000
MAX_RETENTIONS = 16

PRIORITIES = {"priority": -100, "default": 0, "flex": 100, "background": 200}
"""The ``priority`` of a class under the policy `priority`, which has no classes; lower runs sooner."""


class SloBody(Wire):
    """Latency targets. They order the queue, and misses are counted; a miss does not end the request."""

    ttft_ms: float | None = Field(None, gt=0, le=MAX_MS, description="Time to first token (TTFT), in ms.")
    tpot_ms: float | None = Field(
        None, gt=0, le=MAX_MS, description="Mean time per output token after the first (TPOT), in ms."
    )


NO_TARGETS = SloBody(ttft_ms=None, tpot_ms=None)


class RetentionBody(Wire):
    """How long the KV blocks of prompt tokens ``[start, end)`` stay cached."""

    start: int = Field(0, ge=0)
    end: int | None = Field(None, ge=1, description="Default: the prompt's end.")
    priority: int = Field(ge=0, le=100, description="Higher is evicted later; other blocks have 35.")
    ttl_seconds: float | None = Field(
        None, gt=0, le=MAX_MS / 1000, description="Seconds until the priority is 35 again. Default: no limit."
    )


class AgentHint(Wire):
    """What a client knows about its session."""

    ttl_seconds: float | None = Field(
        None,
        gt=0,
        le=MAX_MS / 1000,
        description="How long the session's prompt stays cached after its last use. Default 300.",
    )
    release: bool | None = Field(
        None, description="true: the session ends with this request, and its prompt is retained no longer."
    )


class SessionFields(Wire):
    """The session of a call; its prompt is retained between its turns."""

    session_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00]*$",
        description="Names a session: its newest prompt stays cached and replaces the one before it. The header "
        "X-Session-Id means the same.",
    )
    agent_hint: AgentHint | None = Field(
        None, description="How long the session's prompt is retained. It needs a session."
    )


class SchedulingFields(SessionFields):
    """The fields of every call that generates."""

    priority: int | None = Field(
        None,
        ge=-(2**31),
        lt=2**31,
        description="Lower runs sooner, within the class. Without service_tier its sign names the class: "
        "negative priority, positive flex.",
    )
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        None, description="The class whose share of the machine the request uses."
    )
    slo: SloBody | None = Field(
        None, description="Latency targets of this request (default: those of its class)."
    )
    deadline_ms: int | None = Field(
        None, ge=1, le=MAX_MS, description="Ends with 408 when it passes, or at once if it cannot be met."
    )
    retention: list[RetentionBody] | None = Field(
        None, max_length=MAX_RETENTIONS, description="How long ranges of the prompt's tokens stay cached."
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """What requests may ask of the scheduler: its policy, the classes by name, the terms of tenants."""

    policy: str = "fair"
    classes: Mapping[str, ServiceClass] = field(default_factory=lambda: {each.name: each for each in CLASSES})
    tenants: Tenants = EQUALS


class Scheduling(NamedTuple):
    """The fields as a `core.request.Request` has them; ``seconds`` until its deadline, None without one."""

    service_class: str
    priority: int
    slo: Slo
    seconds: float | None


def scheduling_of(
    body: SchedulingFields, rules: Rules, tenant: str, request_timeout: float, assigned: str = ""
) -> Scheduling:
    """The scheduling parameters of a request. A class ``assigned`` by the server replaces the one that the fields name.

    Raises:
        ApiError: a field that the policy does not use, a class that the tenant may not use, or a deadline after the
            server's timeout.
    """
    if rules.policy in ("fcfs", "static"):
        _refuse(body, rules.policy)
        service_class = assigned or "default"
    else:
        service_class = assigned or _class(body, rules.tenants.terms(tenant), tenant)
    priority = body.priority
    if rules.policy == "priority" and priority is None:
        priority = PRIORITIES[service_class]
    return Scheduling(
        service_class,
        priority or 0,
        _slo(body.slo, rules.classes[service_class]),
        _deadline(body.deadline_ms, request_timeout),
    )


def retentions(body: SchedulingFields, prompt_tokens: int) -> tuple[Retention, ...]:
    """The retentions that ``body`` asks for, checked against the length of the prompt.

    Raises:
        ApiError: a range is empty or reaches beyond the prompt.
    """
    asked = []
    for i, each in enumerate(body.retention or ()):
        path = f"retention[{i}]"
        if each.end is not None and each.end <= each.start:
            raise invalid(f"{path}.end ({each.end}) must be above {path}.start ({each.start})", f"{path}.end")
        for name, value in (("start", each.start + 1), ("end", each.end or 0)):
            if value > prompt_tokens:
                raise invalid(
                    f"{path}.{name} is beyond the prompt's {prompt_tokens} tokens", f"{path}.{name}"
                )
        asked.append(Retention(each.start, each.end, each.priority, each.ttl_seconds))
    return tuple(asked)


def _refuse(body: SchedulingFields, policy: str) -> None:
    for param, value, neutral in (
        ("priority", body.priority, (None, 0)),
        ("service_tier", body.service_tier, (None, "auto", "default")),
        ("slo", body.slo, (None, NO_TARGETS)),
    ):
        if value not in neutral:
            raise invalid(f"{param} needs another --scheduling-policy than this server's {policy}", param)


def _class(body: SchedulingFields, terms: TenantTerms, tenant: str) -> str:
    named, param = body.service_tier, "service_tier"
    if named is None and body.priority:
        named, param = "priority" if body.priority < 0 else "flex", "priority"
    if named in (None, "auto"):
        return terms.default_class
    if not terms.may_use(named):
        allowed = ", ".join(sorted(terms.classes | {terms.default_class}))
        raise invalid(f"{param}: tenant {tenant!r} may use {allowed}, not {named}", param)
    return named


def _slo(asked: SloBody | None, service_class: ServiceClass) -> Slo:
    given = asked or NO_TARGETS
    default = service_class.slo
    return Slo(
        default.ttft_seconds if given.ttft_ms is None else given.ttft_ms / 1000,
        default.tpot_seconds if given.tpot_ms is None else given.tpot_ms / 1000,
    )


def _deadline(deadline_ms: int | None, request_timeout: float) -> float | None:
    if deadline_ms is None:
        return None
    if deadline_ms > 1000 * request_timeout:
        limit = round(1000 * request_timeout)
        message = f"deadline_ms must be at most {limit}: the server ends every request then"
        raise invalid(message, "deadline_ms")
    return deadline_ms / 1000
