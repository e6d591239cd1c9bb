"""Builds the dashboard: its snapshots read the folds of the server, its pages are files of the package."""

from __future__ import annotations

import time
from collections.abc import Mapping

from headrace.api.compile.model import ServedModel
from headrace.api.pages.broadcast import Broadcast
from headrace.api.pages.routes import Pages
from headrace.config import Options
from headrace.observe.dashboard.dashboard import Dashboard
from headrace.observe.dashboard.folds import Folds
from headrace.observe.dashboard.tenants import TenantTable
from headrace.service.quota_meter import limits_of
from headrace.service.service import Service
from headrace.wiring.model import Loaded


def make_pages(loaded: Loaded, options: Options, model: ServedModel, service: Service, folds: Folds) -> Pages:
    """The pages of one engine. The event loop's thread makes the snapshots, so its CPU time is the loop's."""
    most = options.scheduler.max_num_seqs

    def slots() -> int:
        return min(most, loaded.engine.knobs.max_running or most)

    def weight(tenant: str) -> float:
        return model.rules.tenants.terms(tenant).weight

    def limits(tenant: str) -> Mapping[str, Mapping[str, float]]:
        return limits_of(service.meter.rooms(tenant, service.now()))

    dashboard = Dashboard(
        folds,
        TenantTable(folds.usage, folds.goodput, folds.cost, weight, limits),
        slots=slots,
        blocks=loaded.ledger.num_blocks,
        loop_seconds=time.thread_time,
        offset=time.time() - time.monotonic(),
    )
    return Pages(Broadcast(service, dashboard))
