"""Routes of the response caches: statistics, invalidation, and feedback about wrong responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import tenant
from headrace.api.body import typed_body
from headrace.api.caller import CALLER, Caller
from headrace.api.compile.fields import MAX_CHOICES, MAX_TAGS
from headrace.api.errors import ApiError, invalid, permission_denied
from headrace.api.routing import Endpoints, route
from headrace.api.wire import Wire
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.rules.entry import Served
from headrace.response_cache.rules.tags import EVERYTHING, tenant_tag, user_tag


class ClearBody(Wire):
    """Which cached responses to invalidate: those with one of ``tags``, or all within ``scope``."""

    tags: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_TAGS,
        description="Responses that were stored with one of these tags.",
    )
    scope: Literal["tenant", "all"] | None = Field(
        None,
        description="tenant: all responses of the request's tenant; all: of every tenant (admin keys only).",
    )
    user: str | None = Field(
        None, max_length=512, description="The `user` of the requests whose responses are cleared."
    )


class FeedbackBody(Wire):
    """Feedback about one response."""

    id: str = Field(max_length=256, description="The id of the response that was wrong.")
    verdict: Literal["wrong"] = "wrong"
    user: str | None = Field(None, max_length=512, description="The `user` of the request.")


class CacheApi(Endpoints):
    """The endpoints. ``stats`` are the whole server's figures, ``tenant_stats`` those of one tenant."""

    def __init__(
        self,
        lookup: CacheLookup,
        stats: Callable[[], Mapping[str, Any]],
        tenant_stats: Callable[[str], Mapping[str, Any]],
        *,
        max_body_bytes: int,
    ) -> None:
        self._lookup = lookup
        self._stats = stats
        self._tenant_stats = tenant_stats
        self._max_body_bytes = max_body_bytes

    @route(
        "GET /v1/cache/stats",
        Access.INFERENCE,
        "Report cache hits and savings by layer: of the key's tenant, or of all.",
    )
    async def stats(self, request: Request) -> Response:
        """The whole server's figures; for a tenant's key, the tenant's own."""
        self._lookup.service.count()
        key_id = request.scope[CALLER].key_id
        if key_id is not None:
            return JSONResponse({**self._tenant_stats(key_id), **self._lookup.states(key_id)})
        return JSONResponse({**self._stats(), **self._lookup.states()})

    @route(
        "POST /v1/cache/clear",
        Access.INFERENCE,
        "Invalidate cached responses: by tag, of the tenant, or all.",
        body=ClearBody,
        example={"scope": "tenant"},
    )
    async def clear(self, request: Request) -> Response:
        """Invalidate cached responses, and those that are being computed now."""
        body = await typed_body(request, self._max_body_bytes, ClearBody, {})
        owner = _tenant(request, body.user)
        if (body.tags is None) == (body.scope is None):
            raise invalid("give either tags or scope", "scope")
        if body.scope == "all":
            if request.scope[CALLER].key_id is not None:
                raise permission_denied(
                    "scope 'all' clears the responses of every tenant and needs an admin key; use scope 'tenant'",
                    "scope",
                )
            tags = [EVERYTHING]
        else:
            tags = [tenant_tag(owner)] if body.tags is None else [user_tag(owner, tag) for tag in body.tags]
        reached: dict[str, bool] = {}
        for tag in tags:
            for store, done in (await self._lookup.clear(tag)).items():
                reached[store] = reached.get(store, True) and done
        return JSONResponse({"cleared": True, "stores": reached})

    @route(
        "POST /v1/cache/feedback",
        Access.INFERENCE,
        "Report a wrong response: it is deleted from the cache and not stored again.",
        body=FeedbackBody,
    )
    async def feedback(self, request: Request) -> Response:
        """A response was wrong; it is deleted and not stored again."""
        body = await typed_body(request, self._max_body_bytes, FeedbackBody, {})
        owner = _tenant(request, body.user)
        await self._lookup.settle()  # a response that has just ended may not be stored yet
        found = [served for served in self._served(body.id) if served.tenant == owner]
        if not found:
            message = f"No response {body.id!r:.200} is known that could have been cached."
            raise ApiError(404, message, param="id", code="answer_not_found")
        for served in found:
            await self._lookup.bar(served)
        return JSONResponse({"id": body.id, "deleted": len(found)})

    def _served(self, call_id: str) -> list[Served]:
        """What was sent for a request: its one choice, or all of them."""
        ids = [call_id, *(f"{call_id}-{index}" for index in range(MAX_CHOICES))]
        return [served for served in map(self._lookup.served, ids) if served is not None]


def _tenant(request: Request, user: str | None) -> str:
    caller: Caller = request.scope[CALLER]
    return tenant(caller.key_id, caller.tenant_header, user)
