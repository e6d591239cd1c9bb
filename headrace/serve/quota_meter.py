"""Counts what tenants use against their limits, while their calls run.

`serve.service` asks `shortage` before a call is taken and says when one is; the rest it learns from events: a call is
settled when the last of its sequences has ended, by the tokens that were computed for it. It knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.events import AdmitReason, Admitted, Event, Finished
from headrace.core.request import Request
from headrace.core.tenancy.quota import Hold, Limit, Quotas, Room, Shortage
from headrace.core.tenancy.tenants import EQUALS, Tenants

UNSTATED_ANSWER_TOKENS = 512
"""What an answer is charged with at first whose caller names no length; what it has over that is added at its end."""


class _Bill:
    """One call: what it holds, how many of its sequences are open, and what they have used."""

    __slots__ = ("hold", "open", "used")

    def __init__(self, hold: Hold, sequences: int) -> None:
        self.hold = hold
        self.open = sequences
        self.used = 0


class QuotaMeter:
    """A `core.ports.Watcher` that keeps the accounts of the tenants that have limits.

    All sequences of a call are one request; ``model`` is what the server calls the model they are for.
    """

    def __init__(self, tenants: Tenants = EQUALS, model: str = "") -> None:
        self._quotas = Quotas(tenants)
        self._model = model
        self._bills: dict[str, tuple[_Bill, int]] = {}  # and how many tokens of its answer are given
        self._admitted: set[str] = set()

    def shortage(self, requests: Sequence[Request], now: float) -> Shortage | None:
        """The bound of its tenant's that keeps a call out; None: it may enter."""
        return self._quotas.shortage(requests[0].tenant, self._model, _estimate(requests), now)

    def enter(self, requests: Sequence[Request], now: float) -> None:
        """A call was taken."""
        hold = self._quotas.take(requests[0].tenant, self._model, _estimate(requests), now)
        if hold is not None:
            bill = _Bill(hold, len(requests))
            for request in requests:
                self._bills[request.id] = bill, len(request.answered)

    def rooms(self, tenant: str, now: float) -> dict[Limit, Room]:
        """How a tenant's bounds stand."""
        return self._quotas.rooms(tenant, self._model, now)

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


def _estimate(requests: Sequence[Request]) -> int:
    """The tokens that a call may compute at most, where its caller says how long answers may get."""
    answers = (request.params.max_tokens or UNSTATED_ANSWER_TOKENS for request in requests)
    return sum(len(request.tokens) for request in requests) + sum(answers)
