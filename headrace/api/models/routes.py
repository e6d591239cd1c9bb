"""The endpoints of a server of several models.

```
 body's model · ?model=NAME · /models/NAME/path · an id that one of them knows ──> the process of one model
 lists, health and metrics                                                     ──> all of them, as one page
```
Each process is a whole server: it checks the key, the tenant's limits and the body. Here a request is read only as far
as is needed to find its model, behind the same edge.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import beside, json_object, read_body
from headrace.api.errors import (
    ApiError,
    invalid,
    model_not_found,
    model_required,
    model_unavailable,
    shutting_down,
)
from headrace.api.exchange import EXCHANGE
from headrace.api.models.relay import (
    NOT_RETURNED,
    Lost,
    ModelClient,
    Relayed,
    Reply,
    forwarded_headers,
    has_body,
    target_of,
)
from headrace.api.operations.status import METRICS_TYPE
from headrace.api.routing import FORM, Endpoints, route
from headrace.service.model_servers import ModelServer, ModelServers, ModelState

MODELS = "/models/"
"""The prefix of a model's own paths: what follows its name is the path at its server."""

_WITH_ID = re.compile(r"/v1/(?:requests|responses|files|batches)/[^/]+")
"""The paths of what belongs to the model that knows its id; longer paths begin with them."""

ABORT = "/abort_request"
"""A path whose body has the id."""

_SAME = frozenset({"/docs", "/openapi.json", "/version"})
"""Pages that are the same for all models."""

logger = logging.getLogger(__name__)


class Below(Container[str]):
    """The paths of one model, whose server checks them."""

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and path.startswith(MODELS)


class ModelRoutes(Endpoints):
    """The endpoints over ``servers``. A body in which a model is looked up has at most ``max_body_bytes``."""

    def __init__(self, servers: ModelServers, *, max_body_bytes: int) -> None:
        self._servers = servers
        self._max_body_bytes = max_body_bytes
        self._clients = {each: ModelClient(each.path) for each in servers.all}

    @route("GET /v1/models", Access.INFERENCE)
    async def models(self, request: Request) -> Response:
        """The models of all processes."""
        found = await self._ask_all(request)
        return _refusal(found) or JSONResponse(joined_lists(page.body for page in found))

    @route("GET /v1/models/{model:path}", Access.INFERENCE)
    async def model(self, request: Request) -> Response:
        """One model, or an adapter of one."""
        return self._relayed(request, await self._find(request, request.path_params["model"]))

    @route("GET /metrics", Access.METRICS)
    async def metrics(self, request: Request) -> Response:
        """The metrics of all processes."""
        if name := request.query_params.get("model"):
            return self._relayed(request, await self._find(request, name))
        found = await self._ask_all(request)
        pages = ((page.server.name, page.body.decode()) for page in found)
        return _refusal(found) or Response(joined_metrics(pages), media_type=METRICS_TYPE)

    @route("GET /health", Access.PUBLIC)
    @route("GET /livez", Access.PUBLIC)
    @route("GET /healthz", Access.PUBLIC)
    @route("GET /ping", Access.PUBLIC)
    @route("POST /ping", Access.PUBLIC)
    async def health(self, request: Request) -> Response:
        """503 if a model has failed or its steps do not progress; a process that is started again is no failure."""
        return await self._health(request, lambda well: self._servers.health().well and all(well))

    @route("GET /health/ready", Access.PUBLIC)
    @route("GET /readyz", Access.PUBLIC)
    async def ready(self, request: Request) -> Response:
        """200 while at least one model is ready."""
        return await self._health(request, lambda well: self._servers.health().ready and any(well))

    @route("GET /is_sleeping", Access.ANY_KEY)
    async def is_sleeping(self, request: Request) -> Response:
        """Whether all models sleep, and which parts of each."""
        return await self._pages(
            request, lambda pages: {"is_sleeping": bool(pages) and all(e["is_sleeping"] for e in pages)}
        )

    @route("GET /server_info", Access.ANY_KEY)
    async def server_info(self, request: Request) -> Response:
        """The settings and the load of each model."""
        return await self._pages(request, lambda pages: {})

    @route("GET /models/{path:path}", Access.PUBLIC)
    @route("POST /models/{path:path}", Access.PUBLIC)
    @route("DELETE /models/{path:path}", Access.PUBLIC)
    async def below(self, request: Request) -> Response:
        """Any path of one model. Its server checks the key."""
        path: str = request.path_params["path"]
        names = [each for server in self._servers.all for each in server.names if path.startswith(f"{each}/")]
        if not names:
            raise model_not_found(path[:200])
        name = max(names, key=len)
        server = self._servers.named(name)
        assert server is not None
        return self._relayed(request, server, path=path.removeprefix(name))

    @route("GET /{path:path}", Access.ANY_KEY)
    @route("POST /{path:path}", Access.ANY_KEY)
    @route("DELETE /{path:path}", Access.ANY_KEY)
    async def other(self, request: Request) -> Response:
        """All other requests: to one model, which answers them."""
        path, asked = request.url.path, request.query_params.get("model")
        if asked is not None:
            return self._relayed(request, await self._find(request, asked))
        if request.method == "GET" and path in _SAME:
            return self._relayed(request, self._any())
        if request.method != "POST" or request.headers.get("content-type", "").startswith(FORM):
            return await self._with_id(request, path, b"")
        body = await read_body(request, self._max_body_bytes)
        name = await beside(body, lambda: _model_in(body))
        if name is None:
            return await self._with_id(request, path, body)
        return self._relayed(request, await self._find(request, name), body=body)

    def _any(self) -> ModelServer:
        """A model that runs, for what all of them answer alike."""
        running = (each for each in self._servers.all if each.state is ModelState.RUNNING)
        return next(running, self._servers.all[0])

    async def _find(self, request: Request, name: str) -> ModelServer:
        """The model with this name; a name that is not fixed, such as an adapter's, is known to one of them.

        Raises:
            ApiError: 404, there is none.
        """
        if (server := self._servers.named(name)) is not None:
            return server
        target = b"/v1/models/" + quote(name, safe="").encode()
        for server in self._servers.all:
            page = await self._ask(request, server, target, method="GET")
            if page is not None and page.status == 200:
                return server
        raise model_not_found(name[:200])

    async def _with_id(self, request: Request, path: str, body: bytes) -> Response:
        """A request without the name of a model: of the model that knows its id, if it has one.

        Raises:
            ApiError: 400, it has none.
        """
        if path == ABORT:
            probe = partial(self._ask, request, target=target_of(request), body=body)
        elif (found := _WITH_ID.match(path)) is not None:
            probe = partial(self._ask, request, target=quote(found[0]).encode(), method="GET")
        else:
            raise model_required(each.name for each in self._servers.all)
        *first, last = self._running()
        for server in first:
            page = await probe(server)
            if page is not None and page.status != 404:
                return page.response() if path == ABORT else self._relayed(request, server, body=body)
        return self._relayed(request, last, body=body)

    def _running(self) -> list[ModelServer]:
        """The models that run.

        Raises:
            ApiError: 503, none does.
        """
        found = [each for each in self._servers.all if each.state is ModelState.RUNNING]
        if not found:
            self._check(self._servers.all[0])
        return found

    def _check(self, server: ModelServer) -> None:
        """Raise ApiError if a model's process does not run."""
        if server.state is not ModelState.RUNNING:
            raise self._unavailable(server)

    def _unavailable(self, server: ModelServer) -> Exception:
        if self._servers.draining:
            return shutting_down()
        return model_unavailable(server.name, failed=server.state is ModelState.FAILED)

    async def _send(
        self,
        request: Request,
        server: ModelServer,
        target: bytes,
        body: bytes | AsyncIterator[bytes],
        method: str | None = None,
    ) -> Reply:
        """Send a request to a model's process, with the headers of ``request``.

        Raises:
            ApiError: 503, the process does not run.
        """
        method = method or request.method
        self._check(server)
        headers = forwarded_headers(request, request.scope[EXCHANGE].request_id, body, method)
        try:
            return await self._clients[server].send(method, target, headers, body)
        except Lost:
            raise self._unavailable(server) from None

    def _relayed(
        self, request: Request, server: ModelServer, *, path: str | None = None, body: bytes | None = None
    ) -> Response:
        """The response of a model; without ``body`` the request's own body is sent as it arrives."""
        target = target_of(request, path)
        if body is None and not has_body(request):
            body = b""
        return Relayed(self._servers, lambda content: self._send(request, server, target, content), body)

    async def _ask(
        self,
        request: Request,
        server: ModelServer,
        target: bytes,
        body: bytes = b"",
        method: str | None = None,
    ) -> Page | None:
        """A page of one model, for the client of ``request``; None if its process does not answer."""
        try:
            reply = await self._send(request, server, target, body, method)
        except ApiError:
            return None
        try:
            return Page(server, reply.status, dict(_returned(reply)), await reply.whole())
        except Lost:
            return None
        finally:
            reply.close()

    async def _ask_all(self, request: Request) -> list[Page]:
        """The pages of all models that answer, in their order."""
        target = target_of(request)
        asked = await asyncio.gather(*(self._ask(request, each, target) for each in self._servers.all))
        return [page for page in asked if page is not None]

    async def _health(self, request: Request, well: Callable[[list[bool]], bool]) -> Response:
        if name := request.query_params.get("model"):
            return self._relayed(request, await self._find(request, name))
        found = {page.server: page for page in await self._ask_all(request)}
        models = {
            server.name: json.loads(found[server].body) if server in found else {"status": server.state}
            for server in self._servers.all
        }
        fine = well([page.status == 200 for page in found.values()])
        status = self._servers.health().why or ("ok" if fine else "see models")
        return JSONResponse({"status": status, "models": models}, 200 if fine else 503)

    async def _pages(
        self, request: Request, sum_up: Callable[[list[dict[str, Any]]], Mapping[str, Any]]
    ) -> Response:
        if name := request.query_params.get("model"):
            return self._relayed(request, await self._find(request, name))
        found = await self._ask_all(request)
        if (refusal := _refusal(found)) is not None:
            return refusal
        models = {page.server.name: json.loads(page.body) for page in found}
        return JSONResponse({**sum_up([*models.values()]), "models": models})


class Page(NamedTuple):
    """A page of one model."""

    server: ModelServer
    status: int
    headers: Mapping[str, str]
    body: bytes

    def response(self) -> Response:
        """The page as it is."""
        return Response(self.body, self.status, self.headers)


def _refusal(pages: Iterable[Page]) -> Response | None:
    """The first page that is an error, such as that of a wrong key; None if there is none."""
    return next((page.response() for page in pages if page.status != 200), None)


def _returned(reply: Reply) -> Iterator[tuple[str, str]]:
    for name, value in reply.headers:
        if name not in NOT_RETURNED:
            yield name.decode("latin-1"), value.decode("latin-1")


def _model_in(body: bytes) -> str | None:
    """The field ``model`` of a body; None without one.

    Raises:
        ApiError: 400, the body is no JSON object, or the field is no text.
    """
    name = json_object(body).get("model") if body else None
    if name is not None and not isinstance(name, str):
        raise invalid("model must be text", "model")
    return name


LABEL = "model_name"

_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})? (.*)")
_LABEL_VALUE = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def joined_metrics(pages: Iterable[tuple[str, str]]) -> str:
    """Prometheus' pages of several models, by name, as one: each family stands once, with the series of all.

    Series of a process, which name no model, get its label.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for model, page in pages:
        samples: list[str] = []
        for line in page.splitlines():
            if line.startswith("# "):
                _, _, family, *_ = line.split(" ", 3)
                heads, samples = families.setdefault(family, ([], []))
                if line not in heads:
                    heads.append(line)
            elif line:
                samples.append(_labelled(line, model))
    return "".join(f"{line}\n" for parts in families.values() for lines in parts for line in lines)


def _labelled(line: str, model: str) -> str:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    name, labels, value = found.groups()
    if labels and re.search(rf'(?:^|,){LABEL}="', labels):
        return line
    label = f'{LABEL}="{model.translate(_LABEL_VALUE)}"'
    return f"{name}{{{label}{',' + labels if labels else ''}}} {value}"


def joined_lists(bodies: Iterable[bytes]) -> dict[str, Any]:
    """Lists of models as one; the first card of an id counts, as models of several processes may have one name."""
    pages: list[dict[str, Any]] = [json.loads(body) for body in bodies]
    cards: dict[str, Any] = {}
    for page in pages:
        for card in page["data"]:
            cards.setdefault(card["id"], card)
    joined: dict[str, Any] = dict(pages[0]) if pages else {"object": "list"}
    joined["data"] = list(cards.values())
    if "last_id" in joined:  # Anthropic's form
        joined["last_id"] = next(reversed(cards), None)
    return joined
