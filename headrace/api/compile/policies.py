"""What a server has settled about requests: the scheduler's rules, KV transfer, and what happens with prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.api.compile.fields import KVTransferParams
from headrace.api.compile.markers import Marker, chosen
from headrace.api.errors import invalid
from headrace.core.memory.departure import NOWHERE, Place
from headrace.core.request import Request, Retention
from headrace.core.tenancy.tenants import CLASSES, EQUALS, ServiceClass, Tenants
from headrace.service.sessions import Sessions, Turn


@dataclass(frozen=True, slots=True)
class Rules:
    """What requests may ask of the scheduler: its policy, the classes by name, the terms of tenants."""

    policy: str = "fair"
    classes: Mapping[str, ServiceClass] = field(default_factory=lambda: {each.name: each for each in CLASSES})
    tenants: Tenants = EQUALS


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

    ``place`` returns the place of a token, beside the event loop if the text is ``long``; ``tools`` are digests of its
    tools. ``normalized`` lists the changes to its text, and ``headers`` are the response headers that report them.
    """

    place: Callable[[int], Place] = _nowhere
    tools: tuple[int, ...] = ()
    normalized: tuple[dict[str, Any], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    long: bool = False


UNKNOWN = About()

Enter = Callable[[Request, Callable[[int], Place], Sequence[int], Sequence[dict[str, Any]], bool], None]
"""Records a submitted prompt: `observe.prefixes.PrefixBook.enter`."""


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

    @property
    def keeps_sessions(self) -> bool:
        """Whether the prompts of sessions are retained."""
        return self.sessions is not None

    def markers(self, tenants: Tenants, tenant: str) -> tuple[Marker, ...]:
        """The markers that are removed or moved in the prompts of a tenant."""
        own = tenants.terms(tenant).normalize
        return self.normalize if own is None else chosen(own)

    def submit(self, request: Request, about: About, session: SessionOf | None) -> None:
        """Record a request that was submitted, before its events are folded."""
        if self.enter is not None:
            self.enter(request, about.place, about.tools, about.normalized, about.long)
        if self.sessions is not None and session is not None:
            self.sessions.enter(request, session.turn)
