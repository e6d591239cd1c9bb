"""Records requests in the history, under hashed keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from headrace.api.auth.api_keys import tenant
from headrace.api.compile.bodies import ChatBody, CompletionBody
from headrace.api.compile.fields import Generation, Way, control, ways
from headrace.api.exchange import Caller
from headrace.response_cache.history import Recorded
from headrace.response_cache.rules.key import Unkeyable, digest

_KINDS = {**ways(CompletionBody), **ways(ChatBody)}
_IMMATERIAL = {name for name, way in _KINDS.items() if way in (Way.INERT, Way.CONTROL)}
_IMMATERIAL |= {"stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids"}

CHAT_PATH = "/v1/chat/completions"


def _has_images(body: Generation) -> bool:
    return isinstance(body, ChatBody) and any(message.images() for message in body.messages)


_UNSENT = {name for name, way in _KINDS.items() if way is Way.INERT} | {"stream", "stream_options"}
"""Fields of a chat request that are not recorded, because they concern only that request."""


class Asked(Protocol):
    """Takes recorded requests: the history, or in a front end the connection to the owner that has it."""

    def asked(self, key: bytes, tenant: str, at: float, recorded: Recorded | None) -> None: ...


class RequestRecorder:
    """Records requests in ``history``; with ``bodies``, also their bodies (``--record-history``)."""

    def __init__(self, history: Asked, bodies: bool) -> None:
        self._history = history
        self._bodies = bodies

    def note(self, url: str, raw: bytes, body: Generation, caller: Caller) -> Caller:
        """Record one request; returns ``caller`` with the request's key in the history.

        Requests that would have the same response have the same key. A request that sets no_store or has images is not
        recorded.
        """
        return self._note(url, body, caller, lambda: raw)

    def note_chat(self, body: ChatBody, caller: Caller) -> Caller:
        """Record a request of another dialect as its chat request, which is what cache warming computes."""
        return self._note(
            CHAT_PATH,
            body,
            caller,
            lambda: body.model_dump_json(
                exclude_unset=True, exclude_none=True, by_alias=True, exclude=_UNSENT
            ).encode(),
        )

    def _note(self, url: str, body: Generation, caller: Caller, raw: Callable[[], bytes]) -> Caller:
        if control(body.response_cache, caller.cache_control).no_store or _has_images(body):
            return caller
        tenant_name = tenant(caller.key_id, caller.tenant_header, body.user)
        fields = body.model_dump(exclude_unset=True, exclude_none=True, exclude=_IMMATERIAL)
        try:
            key = digest(url, tenant_name, fields)
        except Unkeyable:
            return caller
        recorded = Recorded(url, caller.key_id, caller.tenant_header, raw()) if self._bodies else None
        self._history.asked(key, tenant_name, time.time(), recorded)
        return caller._replace(origin=key)
