"""What the server's policies make of a request: its class, deadline, retention, session and KV transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.api.compile.fields import NO_TARGETS, KVTransferParams, SchedulingFields, SloBody
from headrace.api.compile.markers import Marker, chosen
from headrace.api.errors import invalid
from headrace.core.prefix.departure import NOWHERE, Place
from headrace.core.request import Request, Retention, Slo
from headrace.core.tenancy.classes import CLASSES, ServiceClass
from headrace.core.tenancy.tenants import EQUALS, Tenants, TenantTerms
from headrace.service.sessions import Sessions, Turn

PRIORITIES = {"priority": -100, "default": 0, "flex": 100, "background": 200}
"""The ``priority`` of a class under the policy `priority`, which has no classes; lower runs sooner."""


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


MARKED_RETENTION = 60
"""Retention priority of prompts that clients ask to retain; others have 35."""


KEPT_FOR_A_DAY = Retention(0, None, MARKED_RETENTION, 86_400.0)


KEPT_FOR_DECODING = Retention(0, None, MARKED_RETENTION, 60.0)
"""Retention of a prompt that another server is going to pull."""


FIELD = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class KVSharing:
    """This server's part in KV transfer: where it publishes blocks, and the addresses that it pulls from."""

    engine_id: str = ""
    host: str = ""
    port: int = 0
    peers: Sequence[str] = ()

    def peer(self, asked: KVTransferParams | None) -> str:
        """The one peer that has a call's prompt; empty if any may have it.

        Raises:
            ApiError: ``remote_host`` is no peer, fields contradict each other, or this server publishes no blocks.
        """
        if asked is None:
            return ""
        if asked.do_remote_decode and asked.do_remote_prefill:
            raise invalid(f"{FIELD}: do_remote_decode and do_remote_prefill exclude each other", FIELD)
        if asked.do_remote_decode and not self.port:
            raise invalid(
                f"{FIELD}.do_remote_decode: this server publishes no KV blocks (--kv-transfer-config)", FIELD
            )
        if not asked.do_remote_prefill:
            if asked.remote_prefill_runs:
                raise invalid(f"{FIELD}.remote_prefill_runs needs do_remote_prefill", FIELD)
            return ""
        if asked.remote_host is None or asked.remote_port is None:
            raise invalid(f"{FIELD}.do_remote_prefill needs remote_host and remote_port", FIELD)
        name = f"{asked.remote_host}:{asked.remote_port}"
        if name not in self.peers:
            raise invalid(
                f"{FIELD}.remote_host: this server has no peer {name} (--kv-transfer-config)", FIELD
            )
        return name

    def answer(self, asked: KVTransferParams | None) -> dict[str, Any]:
        """The response's field ``kv_transfer_params`` for the server that will decode; empty if there is none."""
        if asked is None or not asked.do_remote_decode:
            return {}
        return {
            FIELD: {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.engine_id,
                "remote_block_ids": [],
                "remote_host": self.host,
                "remote_port": self.port,
                "tp_size": 1,
            }
        }


NO_SHARING = KVSharing()


def retained(asked: KVTransferParams | None, prompt_cache_retention: str | None) -> tuple[Retention, ...]:
    """How long the whole prompt of a call is retained."""
    day = (KEPT_FOR_A_DAY,) if prompt_cache_retention == "24h" else ()
    return (*day, KEPT_FOR_DECODING) if asked is not None and asked.do_remote_decode else day


SESSION_RETENTION = 60
"""The retention priority of the prompts of sessions; blocks without one have 35."""


SESSION_SECONDS = 300.0
"""How long a session's prompt is retained after its last use, unless ``agent_hint`` says otherwise."""


STORED_RETENTION = 50
"""The retention priority of the prompts of stored responses."""


def _nowhere(at: int) -> Place:
    return NOWHERE


class About(NamedTuple):
    """The description of a prompt.

    ``place`` returns the place of a token, ``tools`` are digests of its tools. ``normalized`` lists the changes to its
    text, and ``headers`` are the response headers that report them.
    """

    place: Callable[[int], Place] = _nowhere
    tools: tuple[int, ...] = ()
    normalized: tuple[dict[str, Any], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


UNKNOWN = About()


Enter = Callable[[Request, Callable[[int], Place], Sequence[int], Sequence[dict[str, Any]]], None]
"""Records a submitted prompt: `observe.prefixes.book.PrefixBook.enter`."""


class SessionOf(NamedTuple):
    """The session of a request, and how long its prompt is retained."""

    turn: Turn
    retention: Retention


def session_of(session: str | None, seconds: float | None, releases: bool) -> SessionOf | None:
    """The session that a client has named; None if it has not."""
    if not session:
        return None
    retention = Retention(0, None, SESSION_RETENTION, SESSION_SECONDS if seconds is None else seconds)
    return SessionOf(Turn(session, releases=releases), retention)


def session_of_stored(response: str, previous: str | None, seconds: float) -> SessionOf:
    """The session of a stored response: its prompt replaces that of ``previous`` and is retained for ``seconds``."""
    turn = Turn(stored_name(response), stored_name(previous) if previous else "")
    return SessionOf(turn, Retention(0, None, STORED_RETENTION, seconds))


def stored_name(response: str) -> str:
    """The session of a stored response; no client can name it."""
    return f"\0{response}"


@dataclass(frozen=True, slots=True)
class PromptPolicy:
    """``normalize`` are the default markers of tenants; without ``enter``, prompts have no explanation."""

    normalize: tuple[Marker, ...] = ()
    enter: Enter | None = None
    sessions: Sessions | None = None

    def markers(self, tenants: Tenants, tenant: str) -> tuple[Marker, ...]:
        """The markers that are removed or moved in the prompts of a tenant."""
        own = tenants.terms(tenant).normalize
        return self.normalize if own is None else chosen(own)

    def submit(self, request: Request, about: About, session: SessionOf | None) -> None:
        """Record a request that was submitted, before its events are folded."""
        if self.enter is not None:
            self.enter(request, about.place, about.tools, about.normalized)
        if self.sessions is not None and session is not None:
            self.sessions.enter(request, session.turn)
