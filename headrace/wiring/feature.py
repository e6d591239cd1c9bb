"""What a feature adds to the server, and what every feature may use. `wiring.server` puts the features in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.routing import Route

from headrace.api.app import BackgroundWork
from headrace.api.rate_limit_headers import rate_headers
from headrace.api.serving import CallNotes
from headrace.core.ports import Watcher
from headrace.observe.cost.report import CostReport
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.usage import UsageBook
from headrace.response_cache.lookup import CacheLookup
from headrace.service.service import Service


class Endpoints(Protocol):
    """A class whose methods answer requests."""

    def routes(self) -> Sequence[Route]: ...


class Feature(NamedTuple):
    """One part of the server.

    ``watchers`` receive the engine's events. ``background`` starts with the server, in the order of the features, and
    stops in reverse order. ``lines`` are logged at the start. ``close`` is called when the engine has stopped.
    """

    endpoints: Sequence[Endpoints] = ()
    watchers: Sequence[Watcher] = ()
    background: Sequence[BackgroundWork] = ()
    lines: Sequence[str] = ()
    close: Callable[[], None] | None = None


class Hall(NamedTuple):
    """What every server has, with or without a model that generates: the service, and the folds that count its work.

    ``lookup`` looks up the response caches before the service. ``usage_of`` returns usage and cost of a tenant.
    """

    name: str
    service: Service
    lookup: CacheLookup
    notes: CallNotes
    page: MetricsPage
    metrics: Metrics
    usage: UsageBook
    cost: CostReport
    usage_of: Callable[[str], Mapping[str, Any]]

    def quota_headers(self, tenant: str, model: str) -> Mapping[str, str]:
        """The headers with the remaining quotas of a tenant, for calls of the model with this name."""
        return rate_headers(self.service.meter.rooms(tenant, self.service.now(), model))

    def cost_of(self, request_ids: Iterable[str]) -> Mapping[str, Any]:
        """The cost of engine requests; all completed steps are counted first."""
        self.service.count()
        return self.cost.usage_cost(request_ids)
