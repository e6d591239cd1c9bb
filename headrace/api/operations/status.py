"""Reports of the server: health, models, metrics, usage, the explanation of one request. Also pause and resume."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.anthropic.wire import SPEAKS, card, listing
from headrace.api.auth.access import Access
from headrace.api.errors import invalid
from headrace.api.exchange import CALLER
from headrace.api.operations.requests import Explain, owned
from headrace.api.routing import Endpoints, route
from headrace.api.serving import CallNotes
from headrace.service.quota_meter import limits_of
from headrace.service.service import Health, Service
from headrace.service.usage_file import UsageFile

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREDICT_SECONDS = 2.0
"""Maximum time that an explanation waits for the end of the current step."""

ExplainPrefix = Callable[[str, bool], Awaitable[Mapping[str, Any] | None]]
"""Explains where a request's prompt stopped matching the prefix cache. The flag: the client may see all tenants."""


async def _unexplained(request_id: str, all_tenants: bool) -> None:
    return None


class ListedModel(Protocol):
    """A model in ``/v1/models``: `api.compile.model.ServedModel`, or `embedding.routes.PoolingCard`."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def created(self) -> int: ...

    @property
    def card(self) -> dict[str, Any]: ...

    def check_name(self, asked: str | None) -> None: ...


class Status(Endpoints):
    """The endpoints. ``others`` are models for embeddings and reranking, ``adapters`` returns the LoRA adapters.

    ``explain`` and ``metrics`` come from `observe`. ``/server_info`` returns ``info``. ``reset`` empties the prefix
    cache. ``predict_start`` returns the queue position and the predicted start of a waiting request; it must be called
    between two steps. ``prefix`` returns where the prompt stopped matching the prefix cache. ``not_yet`` names the work
    that must end before the server is ready.
    """

    def __init__(
        self,
        service: Service,
        model: ListedModel,
        notes: CallNotes,
        *,
        explain: Explain,
        metrics: Callable[[], bytes],
        info: Callable[[], Mapping[str, Any]],
        reset: Callable[[], object],
        version: str,
        predict_start: Explain = lambda request_id, now: None,
        prefix: ExplainPrefix = _unexplained,
        not_yet: Callable[[], str] = str,
        others: Sequence[ListedModel] = (),
        adapters: Callable[[], Sequence[ListedModel]] = tuple,
    ) -> None:
        self._service = service
        self._model = model
        self._notes = notes
        self._explain = explain
        self._metrics = metrics
        self._info = info
        self._reset = reset
        self._version = version
        self._predict_start = predict_start
        self._prefix = prefix
        self._not_yet = not_yet
        self._fixed = [each for each in others if each.name != model.name]
        self._adapters = adapters

    @property
    def _others(self) -> Sequence[ListedModel]:
        return [*self._fixed, *self._adapters()]

    @route("GET /v1/models", Access.INFERENCE, "List the served models.")
    async def models(self, request: Request) -> Response:
        if SPEAKS in request.headers:
            return JSONResponse(listing([self._model, *self._adapters()]))
        cards = [each.card | {"id": name} for each in (self._model, *self._others) for name in each.names]
        return JSONResponse({"object": "list", "data": cards})

    @route("GET /v1/models/{model:path}", Access.INFERENCE, "Describe one model.")
    async def retrieve_model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        model = next((each for each in self._others if asked in each.names), self._model)
        model.check_name(asked)
        name = asked if asked in model.names else model.name
        return JSONResponse(card(model, name) if SPEAKS in request.headers else model.card | {"id": name})

    @route(
        "GET /v1/requests/{id}",
        Access.INFERENCE,
        "Explain a request by id or X-Request-Id: state, position, reasons, tokens.",
    )
    async def explain(self, request: Request) -> Response:
        """Explains a request, by its id or its ``X-Request-Id``.

        A call with several choices shows each of them. With API keys, a request is shown only to its tenant.
        """
        call = owned(request, self._service, self._notes, self._explain)
        all_tenants = request.scope[CALLER].key_id is None
        for each in call.sequences:
            if (prefix := await self._prefix(each["id"], all_tenants)) is not None:
                each["prefix"] = prefix
            if each["state"] == "waiting":
                each |= await self._predicted(each["id"])
        return JSONResponse(call.shown(call.sequences) | {"metadata": call.metadata})

    async def _predicted(self, request_id: str) -> Mapping[str, Any]:
        ask = self._service.between_steps(lambda: self._predict_start(request_id, self._service.now()))
        try:
            return await asyncio.wait_for(ask, PREDICT_SECONDS) or {}
        except TimeoutError:  # the engine is stalled: explain the request without it
            return {}

    @route(
        "GET /health",
        Access.PUBLIC,
        "Liveness: 200 while steps make progress, otherwise 503 with the reason.",
        metrics_port=True,
    )
    @route("GET /livez", Access.PUBLIC, "Alias of /health.", metrics_port=True)
    @route("GET /healthz", Access.PUBLIC, "Alias of /health.", metrics_port=True)
    @route("GET /ping", Access.PUBLIC, "Alias of /health.", metrics_port=True)
    @route("POST /ping", Access.PUBLIC, metrics_port=True)
    async def health(self, request: Request) -> Response:
        """200 while steps make progress; 503 with the reason if requests wait and no step finishes."""
        health = self._service.health()
        return JSONResponse(_health(health), 200 if health.well else 503)

    @route(
        "GET /health/ready",
        Access.PUBLIC,
        "Readiness: 200 while the server accepts requests and its caches are warm.",
        metrics_port=True,
    )
    @route("GET /readyz", Access.PUBLIC, "Alias of /health/ready.", metrics_port=True)
    async def ready(self, request: Request) -> Response:
        """200 while the server accepts requests and has warmed its caches as configured."""
        health = self._service.health()
        not_yet = self._not_yet()
        shown = _health(health) | ({"status": not_yet} if health.ready and not_yet else {})
        return JSONResponse(shown, 200 if health.ready and not not_yet else 503)

    @route("GET /version", Access.PUBLIC, "Report the version of the server.", metrics_port=True)
    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    @route("GET /server_info", Access.ANY_KEY, "Report the model, the settings and the current load.")
    async def server_info(self, request: Request) -> Response:
        """Model, settings, and the current load."""
        load = self._service.load()
        counts = {
            "open_requests": self._service.open_requests(),
            "queued_requests": load.queued_requests,
            "queued_tokens": load.queued_tokens,
            "draining": load.draining,
            "steps": self._service.thread.progress().steps,
        }
        model = {"model": self._model.name, "max_model_len": self._model.max_model_len}
        return JSONResponse({"version": self._version} | model | counts | dict(self._info()))

    @route("GET /metrics", Access.METRICS, "Report metrics in Prometheus' text format.", metrics_port=True)
    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        self._service.count()
        return Response(self._metrics(), media_type=METRICS_TYPE)

    @route("POST /reset_prefix_cache", Access.ADMIN, "Empty the prefix cache.")
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empty the prefix cache between two steps."""
        await self._service.between_steps(self._reset)
        return JSONResponse({"reset": True})


def _health(health: Health) -> dict[str, Any]:
    progress = health.progress
    return {
        "status": health.why or "ok",
        "steps": progress.steps,
        "open_requests": progress.open_requests,
        "stalled_seconds": round(progress.stalled_seconds, 3),
    }


class Pause(Endpoints):
    """Reject new requests for a while. Queued and running ones continue, and cached responses are still served."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @route("POST /pause", Access.ADMIN, "Reject new requests; queued and running ones continue.")
    async def pause(self, request: Request) -> Response:
        """Reject new requests with 503 until ``/resume``."""
        return self._set(True)

    @route("POST /resume", Access.ADMIN, "Accept new requests again.")
    async def resume(self, request: Request) -> Response:
        """Accept new requests again."""
        return self._set(False)

    def _set(self, paused: bool) -> Response:
        if paused != self._service.paused:
            logger.warning("paused: new requests are rejected" if paused else "resumed")
        self._service.paused = paused
        return JSONResponse({"paused": paused, "open_requests": self._service.open_requests()})


MOST_SHOWN = 1000
"""Most tenants in one response; ``?tenant=`` selects one."""


class UsageReport(Endpoints):
    """Tokens and requests used by each tenant, and its remaining quotas.

    ``tenants`` lists the known tenants, ``tell`` returns the usage of one, ``device`` the accounting of device time,
    and ``focus`` the cost of a tenant (None: of all, with idle time) as CSV; they come from `observe`. With ``file``,
    cost and savings include earlier processes.
    """

    def __init__(
        self,
        service: Service,
        tenants: Callable[[], Iterable[str]],
        tell: Callable[[str], Mapping[str, Any]],
        device: Callable[[float], Mapping[str, Any]] = lambda now: {},
        focus: Callable[[str | None], str] = lambda tenant: "",
        file: UsageFile | None = None,
    ) -> None:
        self._service = service
        self._tenants = tenants
        self._tell = tell
        self._device = device
        self._focus = focus
        self._file = file

    @route(
        "GET /v1/usage",
        Access.INFERENCE,
        "Report usage and remaining quotas: of the key's tenant, or of all; ?tenant= selects one.",
    )
    async def usage(self, request: Request) -> Response:
        """All tenants, or the one named by ``?tenant=``. An API key sees its own tenant only.

        ``?format=focus`` returns the cost as CSV in the columns of FOCUS. The accounting of device time is shown to
        admin keys, or to all clients if the server has no keys.
        """
        self._service.count()
        asked = request.scope[CALLER].key_id or request.query_params.get("tenant")
        file = self._file
        stored = [] if file is None or asked else await file.tenants()
        names = [asked] if asked else sorted({*self._tenants(), *stored})
        form = request.query_params.get("format", "json")
        if form == "focus":
            text = self._focus(asked) if file is None else await file.focus(asked)
            return Response(text, media_type="text/csv; charset=utf-8")
        if form != "json":
            raise invalid(f"format must be json or focus, got {form[:40]!r}", "format")
        shown = [await self._of(name) for name in names[:MOST_SHOWN]]
        page: dict[str, Any] = {"object": "list", "data": shown, "has_more": len(names) > len(shown)}
        if request.scope[CALLER].key_id is None:
            page["device"] = self._device(self._service.now())
        return JSONResponse(page)

    async def _of(self, tenant: str) -> dict[str, Any]:
        rooms = self._service.meter.rooms(tenant, self._service.now())
        limits = limits_of(rooms)
        stored = {} if self._file is None else await self._file.tenant(tenant)
        return {**self._tell(tenant), **stored, "limits": limits}
