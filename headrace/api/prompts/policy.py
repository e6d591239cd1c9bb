"""Handles the prompts of a model's calls: normalization, explanation, sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.api.prompts.markers import Marker, chosen
from headrace.core.prefix.departure import NOWHERE, Place
from headrace.core.request import Request, Retention
from headrace.core.tenancy.tenants import Tenants
from headrace.service.sessions import Sessions, Turn

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
