"""``/v1/cache/pairs``: pairs of requests that the semantic cache took for the same, to label, and their labels.

Both directions are JSON lines: what is exported is labelled and sent back. There is no answer in it. A file with one
wrong line changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import read_body
from headrace.api.errors import ApiError, invalid
from headrace.api.routing import Endpoints, route
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.ports import LabelledPairs
from headrace.response_cache.rules.pairs import BadLine, SeenPair, read_pair

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
