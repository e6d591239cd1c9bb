"""The routes of the response caches: what they saved, what is to be forgotten, what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.core.cache.response.entry import Served
from headrace.core.cache.response.tags import EVERYTHING, tenant_tag, user_tag
from headrace.serve.auth.api_keys import tenant
from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.body import read_body
from headrace.serve.http.cache.wire import MAX_TAGS
from headrace.serve.http.edge import CALLER
from headrace.serve.http.errors import ApiError, invalid
from headrace.serve.http.generation.call import Caller
from headrace.serve.http.generation.fields import MAX_CHOICES
from headrace.serve.http.wire import Wire, parse


class ClearBody(Wire):
    """What to forget: answers with one of ``tags``, else all of the caller's, else everybody's."""

    tags: list[Annotated[str, Field(min_length=1, max_length=128)]] | None = Field(
        None, min_length=1, max_length=MAX_TAGS, description="Answers that were given one of these."
    )
    scope: Literal["tenant", "all"] | None = Field(
        None, description="All answers of the caller's tenant, or of every tenant (servers without keys)."
    )
    user: str | None = Field(None, max_length=512, description="As in the calls that made the answers.")


class FeedbackBody(Wire):
    """An answer that was wrong."""

    id: str = Field(max_length=256, description="The id of the answer that was wrong.")
    verdict: Literal["wrong"] = "wrong"
    user: str | None = Field(None, max_length=512, description="As in the call that got the answer.")


class CacheApi:
    """The endpoints; ``stats`` is what the ledger of `observe` counts, which this room must not know."""

    def __init__(
        self,
        recall: CacheLookup,
        stats: Callable[[], Mapping[str, Any]],
        *,
        keys_required: bool,
        max_body_bytes: int,
    ) -> None:
        self._recall = recall
        self._stats = stats
        self._keys_required = keys_required
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        """What to mount."""
        return [
            Route("/v1/cache/stats", self.stats),
            Route("/v1/cache/clear", self.clear, methods=["POST"]),
            Route("/v1/cache/feedback", self.feedback, methods=["POST"]),
        ]

    async def stats(self, request: Request) -> Response:
        """``GET /v1/cache/stats``: hits, misses, time, room, tokens and money saved, by layer."""
        self._recall.service.count()
        return JSONResponse(dict(self._stats()))

    async def clear(self, request: Request) -> Response:
        """``POST /v1/cache/clear``: no answer that there is now, or is being computed now, will be served again."""
        body = parse(await read_body(request, self._max_body_bytes), ClearBody, {})
        who = _tenant(request, body.user)
        if (body.tags is None) == (body.scope is None):
            raise invalid("give either tags or scope", "scope")
        if body.scope == "all":
            if self._keys_required:
                message = (
                    "scope 'all' would clear other tenants' answers; with API keys, a key clears its own"
                )
                raise ApiError(403, message, type="permission_error", param="scope", code="not_allowed")
            tags = [EVERYTHING]
        else:
            tags = [tenant_tag(who)] if body.tags is None else [user_tag(who, tag) for tag in body.tags]
        heard: dict[str, bool] = {}
        for tag in tags:
            for store, done in (await self._recall.clear(tag)).items():
                heard[store] = heard.get(store, True) and done
        return JSONResponse({"cleared": True, "stores": heard})

    async def feedback(self, request: Request) -> Response:
        """``POST /v1/cache/feedback``: an answer was wrong; it is deleted, and none is kept in its place."""
        body = parse(await read_body(request, self._max_body_bytes), FeedbackBody, {})
        who = _tenant(request, body.user)
        await self._recall.settle()  # what has just ended may not be kept yet
        found = [served for served in self._served(body.id) if served.tenant == who]
        if not found:
            message = f"No answer {body.id!r} is remembered that could have been kept."
            raise ApiError(404, message, param="id", code="answer_not_found")
        for served in found:
            await self._recall.bar(served)
        return JSONResponse({"id": body.id, "deleted": len(found)})

    def _served(self, call_id: str) -> list[Served]:
        """What went out in a call: its one answer, or all of them."""
        ids = [call_id, *(f"{call_id}-{index}" for index in range(MAX_CHOICES))]
        return [served for served in map(self._recall.served, ids) if served is not None]


def _tenant(request: Request, user: str | None) -> str:
    caller: Caller = request.scope[CALLER]
    return tenant(caller.key_id, caller.tenant_header, user)
