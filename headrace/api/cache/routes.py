"""Routes of the response caches: statistics, invalidation, feedback about wrong responses, and pairs to label."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import tenant
from headrace.api.body import read_body, typed_body
from headrace.api.compile.fields import MAX_CHOICES, MAX_TAGS
from headrace.api.errors import ApiError, invalid, permission_denied
from headrace.api.exchange import CALLER, Caller
from headrace.api.routing import Endpoints, route
from headrace.api.wire import Wire
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.ports import LabelledPairs
from headrace.response_cache.rules.entry import Served
from headrace.response_cache.rules.pairs import BadLine, SeenPair, read_pair
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


JSON_LINES = "application/jsonl"


class PairsApi(Endpoints):
    """The endpoints over the pairs of ``lookup``."""

    def __init__(self, lookup: CacheLookup, *, max_body_bytes: int) -> None:
        self._lookup = lookup
        self._max_body_bytes = max_body_bytes

    @route(
        "GET /v1/cache/pairs",
        Access.ADMIN,
        "Export pairs of similar requests, without answers, as JSON lines to label: of all tenants, or of `tenant`.",
    )
    async def export(self, request: Request) -> Response:
        """The pairs that were served, or would be, and those that a check kept apart."""
        pairs = self._pairs().export(request.query_params.get("tenant"))
        lines = [json.dumps(pair.to_json(), ensure_ascii=False) + "\n" for pair in pairs]
        return Response("".join(lines).encode("utf-8", "replace"), media_type=JSON_LINES)

    @route(
        "POST /v1/cache/pairs",
        Access.ADMIN,
        "Import labelled pairs: exported JSON lines with the label `same` or `different`. All or none are stored.",
        media=JSON_LINES,
    )
    async def label(self, request: Request) -> Response:
        """Store labels, and certify the thresholds of their tenants anew."""
        pairs = self._pairs()
        if not pairs.labelled:
            message = "Labels have no file to be stored in: start the server with --semantic-labels FILE."
            raise ApiError(409, message, code="no_label_file")
        raw = await read_body(request, self._max_body_bytes)
        labelled, without = await asyncio.to_thread(_read, raw, pairs.name)
        try:
            done = await asyncio.to_thread(pairs.label, labelled)
        except OSError as error:
            raise ApiError(500, str(error), type="server_error", code="labels_not_stored") from error
        return JSONResponse({**done, "without_label": without})

    def _pairs(self) -> LabelledPairs:
        pairs = self._lookup.pairs
        if pairs is None:
            message = "No pairs are recorded: --semantic-cache is neither shadow nor serve."
            raise ApiError(404, message, code="no_semantic_cache")
        return pairs


def _read(raw: bytes, basis: str) -> tuple[list[tuple[SeenPair, bool]], int]:
    """The labelled pairs of JSON lines, each of this ``basis``, and the number of lines without a label."""
    labelled: dict[str, tuple[SeenPair, bool]] = {}
    without = 0
    for number, line in _lines(raw):
        try:
            found = read_pair(line)
        except BadLine as error:
            raise invalid(f"line {number}: {error}") from None
        if found is None:
            without += 1
            continue
        pair, same = found
        if pair.basis != basis:
            why = "recorded with another calibration, threshold by hand or encoder than the server's"
            raise invalid(f"line {number}: basis: {why}")
        if labelled.get(pair.id, (pair, same))[1] is not same:
            raise invalid(f"line {number}: id: an earlier line has another label for this pair")
        labelled[pair.id] = pair, same
    return list(labelled.values()), without


def _lines(raw: bytes) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise invalid(f"line {number}: not UTF-8 text") from None
        if text:
            yield number, text
