"""The parts of a snapshot, for the whole server or for one tenant.

`measure` reads the server's existing folds once a second, only while a page is open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.observe.dashboard.folds import Folds
from headrace.observe.dashboard.latency import latency
from headrace.observe.dashboard.overview import overview
from headrace.observe.dashboard.reading import Readings, read
from headrace.observe.dashboard.request_rows import request_rows
from headrace.observe.dashboard.tenant_overview import TenantReadings
from headrace.observe.dashboard.tenants import TenantTable


class Dashboard:
    """Makes snapshots.

    ``slots`` returns the current limit of running requests. ``blocks`` is the number of KV blocks. ``loop_seconds``
    returns the CPU time of the event loop's thread, on which all methods are called. ``offset`` is Unix time minus the
    engine's clock.
    """

    def __init__(
        self,
        folds: Folds,
        tenants: TenantTable,
        *,
        slots: Callable[[], int],
        blocks: int,
        loop_seconds: Callable[[], float],
        offset: float,
    ) -> None:
        self._from = folds
        self._tenants = tenants
        self._slots = slots
        self._blocks = blocks
        self._loop_seconds = loop_seconds
        self._offset = offset
        self._readings = Readings()
        self._of_tenants = TenantReadings(folds.usage)

    def measure(self, now: float) -> None:
        """Take a reading; called before each round of snapshots."""
        folds = self._from
        self._readings.add(read(folds.metrics, folds.cost.ledger, folds.work, self._loop_seconds(), now))

    def snapshot(self, part: str, tenant: str | None, now: float) -> dict[str, Any]:
        """The overview and one further part (empty: none), optionally of one tenant only.

        Raises:
            KeyError: the part is unknown.
        """
        made: dict[str, Any] = {"time": now + self._offset, "now": now}
        made["overview"] = self._overview(now) if tenant is None else self._overview_of(tenant, now)
        if part:
            made[part] = PARTS[part](self, tenant, now)
        return made

    def _overview(self, now: float) -> dict[str, Any]:
        folds = self._from
        return overview(
            self._readings,
            folds.goodput,
            folds.cost.ledger,
            folds.metrics.caches.stats()["layers"],
            latency=latency(folds.book.summaries(), now),
            slots=self._slots(),
            blocks=self._blocks,
            peaks=folds.work.peaks,
        )

    def _overview_of(self, tenant: str, now: float) -> dict[str, Any]:
        folds = self._from
        return self._of_tenants.overview(
            tenant, list(folds.book.summaries(tenant)), folds.savings.stats(tenant), folds.cost, now
        )

    def _requests(self, tenant: str | None, now: float) -> Mapping[str, Any]:
        return request_rows(list(self._from.book.summaries(tenant)), now)

    def _caches(self, tenant: str | None, now: float) -> Mapping[str, Any]:
        return self._from.metrics.caches.stats() if tenant is None else self._from.savings.stats(tenant)

    def _tenant_table(self, tenant: str | None, now: float) -> Mapping[str, Any]:
        return self._tenants.all() if tenant is None else self._tenants.one(tenant)


PARTS: Mapping[str, Callable[[Dashboard, str | None, float], Mapping[str, Any]]] = {
    "requests": Dashboard._requests,
    "caches": Dashboard._caches,
    "tenants": Dashboard._tenant_table,
}
"""The further parts of a snapshot."""
