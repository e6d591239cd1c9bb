"""Counts the usage of tenants against their quotas while their calls run.

`service.service` calls `shortage` before it accepts a call and `enter` when it has accepted one. The rest follows from
events: when the last sequence of a call has ended, the meter charges the tokens that were computed for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.core.events import AdmitReason, Admitted, Event, Finished
from headrace.core.request import Request
from headrace.core.tenancy.kv_limits import NO_KV_BOUNDS, KvBounds
from headrace.core.tenancy.quota import Charge, Limit, Quotas, Room, Shortage
from headrace.core.tenancy.tenants import EQUALS, Tenants, is_awaited

UNSTATED_ANSWER_TOKENS = 512
"""Output tokens charged in advance for a request without a length limit; the difference is charged at its end."""


class _Bill:
    """One call: its reservation, the number of its open sequences, and the tokens used so far."""

    __slots__ = ("hold", "open", "used")

    def __init__(self, hold: Charge, sequences: int) -> None:
        self.hold = hold
        self.open = sequences
        self.used = 0


class QuotaMeter:
    """A `core.ports.Watcher` that accounts the usage of tenants with quotas.

    All sequences of a call count as one request. ``model`` is the name of the served model, which
    counts for calls that name none. ``kv`` bounds the KV memory of tenants and classes; a request may hold at most
    ``max_model_len`` tokens.
    """

    fold_tokens = None

    def __init__(
        self,
        tenants: Tenants = EQUALS,
        model: str = "",
        kv: KvBounds = NO_KV_BOUNDS,
        max_model_len: int = 0,
    ) -> None:
        self._quotas = Quotas(tenants)
        self._kv = kv
        self._max_model_len = max_model_len
        self._model = model
        self._bills: dict[str, tuple[_Bill, int]] = {}  # with the tokens of a resumed answer
        self._admitted: set[str] = set()

    def shortage(self, requests: Sequence[Request], now: float) -> Shortage | None:
        """The tenant's quota that rejects a call; None if the call is accepted."""
        first = requests[0]
        return self._kv_shortage(requests) or self._quotas.shortage(
            first.tenant, first.model or self._model, _estimate(requests), now
        )

    def enter(self, requests: Sequence[Request], now: float) -> None:
        """Reserve the tokens of an accepted call."""
        first = requests[0]
        hold = self._quotas.take(first.tenant, first.model or self._model, _estimate(requests), now)
        if hold is not None:
            bill = _Bill(hold, len(requests))
            for request in requests:
                self._bills[request.id] = bill, len(request.answered)

    def shortage_of(self, tenant: str, model: str, tokens: int, now: float) -> Shortage | None:
        """Like `shortage`, for a call of ``tokens`` to another model than the served one."""
        return self._quotas.shortage(tenant, model, tokens, now)

    def hold(self, tenant: str, model: str, tokens: int, now: float) -> Charge | None:
        """Reserve the tokens of a call to another model until `settle`; None if the tenant has no limits."""
        return self._quotas.take(tenant, model, tokens, now)

    def settle(self, hold: Charge, used: int, now: float) -> None:
        """Charge the ``used`` tokens of a call to another model that has ended."""
        self._quotas.settle(hold, used, now)

    def rooms(self, tenant: str, now: float, model: str = "") -> dict[Limit, Room]:
        """Limit, remaining amount and reset time of each quota of a tenant, for calls of ``model`` (empty: the served
        one).
        """
        return self._quotas.rooms(tenant, model or self._model, now)

    def replace(self, tenants: Tenants, kv: KvBounds) -> None:
        """Apply other limits from now on."""
        self._quotas.replace(tenants)
        self._kv = kv

    def _kv_shortage(self, requests: Sequence[Request]) -> Shortage | None:
        """The bound on KV memory that a request of the call exceeds even if it runs alone."""
        first, most = requests[0], self._max_model_len
        bounds = {
            Limit.KV_TOKENS: self._kv.of_tenant(first.tenant) if is_awaited(first.service_class) else None,
            Limit.CLASS_KV_TOKENS: self._kv.classes.get(first.service_class),
        }
        for limit, bound in bounds.items():
            largest = max(_most_tokens(request, most) for request in requests)
            if bound is not None and largest > bound:
                return Shortage(limit, bound, 0, largest, math.inf)
        return None

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, Admitted):
            if event.reason is AdmitReason.NEW and event.request_id in self._bills:
                self._admitted.add(event.request_id)
        elif isinstance(event, Finished):
            known = self._bills.pop(event.request_id, None)
            if known is None:
                return
            bill, given = known
            if event.request_id in self._admitted:
                self._admitted.remove(event.request_id)
                bill.used += event.prompt_tokens - event.cached_tokens + event.output_tokens - given
            bill.open -= 1
            if not bill.open:
                self._quotas.settle(bill.hold, bill.used, now)


def limits_of(rooms: Mapping[Limit, Room]) -> dict[str, dict[str, float]]:
    """The limits of a tenant as plain values for JSON."""
    return {
        limit.value: {
            "limit": room.allowed,
            "remaining": room.remaining,
            "reset_seconds": round(room.reset_seconds, 3),
        }
        for limit, room in rooms.items()
    }


def _most_tokens(request: Request, max_model_len: int) -> int:
    """The most tokens that a request may hold, prompt and output."""
    asked = request.params.max_tokens
    return max_model_len if asked is None else min(len(request.tokens) + asked, max_model_len)


def _estimate(requests: Sequence[Request]) -> int:
    """The maximum tokens that a call may compute; `UNSTATED_ANSWER_TOKENS` for an output without a limit."""
    answers = (request.params.max_tokens or UNSTATED_ANSWER_TOKENS for request in requests)
    return sum(len(request.tokens) for request in requests) + sum(answers)
