"""``/v1/files``: upload, list, get, download and delete. A tenant reaches only its own files."""

from __future__ import annotations

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from headrace.api.auth.api_keys import tenant
from headrace.api.batch.batches import Batches
from headrace.api.batch.store import FileInUse
from headrace.api.batch.upload import receive
from headrace.api.batch.wire import file_object, found, list_object, not_found
from headrace.api.caller import CALLER, Caller
from headrace.api.errors import ApiError
from headrace.api.paging import read_page

MAX_LISTED = 10_000
"""Maximum and default number of files in a page, as at OpenAI."""


def tenant_of(request: Request) -> str:
    """The tenant that sends a request; the field ``user`` of lines does not count."""
    caller: Caller = request.scope[CALLER]
    return tenant(caller.key_id, caller.tenant_header, None)


class Files:
    """The endpoint."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list),
            Route("/v1/files/{id}", self.get),
            Route("/v1/files/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self.content),
        ]

    async def upload(self, request: Request) -> Response:
        """``POST /v1/files``."""
        return JSONResponse(file_object(await receive(request, self._batches, tenant_of(request))))

    async def list(self, request: Request) -> Response:
        """``GET /v1/files``."""
        limit, newest_first, after = read_page(request.query_params, MAX_LISTED, MAX_LISTED)
        with found("file", after or "", "after"):
            files = await self._batches.files(
                tenant_of(request),
                limit=limit + 1,
                after=after,
                purpose=request.query_params.get("purpose"),
                newest_first=newest_first,
            )
        return JSONResponse(list_object([file_object(file) for file in files], limit))

    async def get(self, request: Request) -> Response:
        """``GET /v1/files/{id}``."""
        id = request.path_params["id"]
        with found("file", id, "id"):
            return JSONResponse(file_object(await self._batches.file(tenant_of(request), id)))

    async def content(self, request: Request) -> Response:
        """``GET /v1/files/{id}/content``."""
        id = request.path_params["id"]
        with found("file", id, "id"):
            file = await self._batches.file(tenant_of(request), id)
        path = self._batches.contents.path(file.id)
        if not path.exists():  # it has just been deleted
            raise not_found("file", id, "id")
        return FileResponse(
            path,
            media_type="application/octet-stream",
            headers={"Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}"},
        )

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/files/{id}``."""
        id = request.path_params["id"]
        try:
            with found("file", id, "id"):
                await self._batches.remove_file(tenant_of(request), id)
        except FileInUse:
            message = f"The file {id!r} is the input of a batch that has not ended; cancel the batch first."
            raise ApiError(409, message, param="id", code="file_in_use") from None
        return JSONResponse({"id": id, "object": "file", "deleted": True})
