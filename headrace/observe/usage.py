"""Usage of each tenant since the server started, for ``GET /v1/usage``: requests, tokens, rejections.

Tokens are counted when they are computed, so the sum over all tenants is the work of the engine. Requests served by
response caches are counted separately. Remaining quotas are in `service.quota_meter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.embedding import Embedded
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    Emitted,
    Event,
    Finished,
    Spared,
    TurnedAway,
)
from headrace.observe.metrics_page import OTHER

MOST_TENANTS = 10_000
"""Maximum number of tenants with separate accounts; further tenants are counted together as ``other``."""


class _Account:
    """The counts of one tenant."""

    __slots__ = (
        *("cached", "computed", "generated", "open", "prompt", "reasons", "refused", "requests"),
        *("embedding_inputs", "embedding_requests", "embedding_tokens", "spared", "spared_tokens"),
    )

    def __init__(self) -> None:
        self.requests = self.open = 0
        self.prompt = self.computed = self.cached = self.generated = 0
        self.spared = self.spared_tokens = 0
        self.embedding_requests = self.embedding_inputs = self.embedding_tokens = 0
        self.reasons: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


class UsageBook:
    """A `core.ports.Watcher` that keeps one account per tenant."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._live: dict[str, _Account] = {}

    def fold_tokens(self, emitted: Sequence[Emitted], now: float) -> None:
        """Tokens of a step."""
        for request_id, tokens, _ in emitted:
            self._live[request_id].generated += len(tokens)

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, Emitted):
            self.fold_tokens((event,), now)
        elif isinstance(event, Chunked):
            self._live[event.request_id].computed += event.length
        elif isinstance(event, Arrived):
            account = self._live[event.request_id] = self._account(event.tenant)
            account.requests += 1
            account.open += 1
            account.prompt += event.prompt_tokens
        elif isinstance(event, Admitted):
            if event.reason is AdmitReason.NEW:
                self._live[event.request_id].cached += event.cached_tokens
        elif isinstance(event, Finished):
            ended = self._live.pop(event.request_id, None)
            if ended is not None:
                ended.open -= 1
                ended.reasons[event.reason] += 1
        elif isinstance(event, TurnedAway):
            self._account(event.tenant).refused[event.reason] += 1
        elif isinstance(event, Embedded):
            self._embedded(self._account(event.tenant), event)
        elif isinstance(event, Spared):
            spared = self._account(event.tenant)
            spared.spared += 1
            spared.spared_tokens += event.prompt_tokens + event.output_tokens

    def _embedded(self, account: _Account, event: Embedded) -> None:
        if event.rejected is not None:
            account.refused[event.rejected] += 1
            return
        account.embedding_requests += 1
        account.embedding_inputs += event.inputs
        account.embedding_tokens += event.computed_tokens

    def tenants(self) -> list[str]:
        """All tenants that have an account."""
        return sorted(self._accounts)

    def account(self, tenant: str) -> Mapping[str, Any]:
        """The account of one tenant, as plain values for JSON; zeros for an unknown tenant."""
        account = self._accounts.get(tenant) or _Account()
        return {
            "tenant": tenant,
            "requests": account.requests,
            "open_requests": account.open,
            "finished": dict(account.reasons),
            "refused": dict(account.refused),
            "prompt_tokens": account.prompt,
            "computed_tokens": account.computed,
            "cached_tokens": account.cached,
            "generated_tokens": account.generated,
            "embedding_requests": account.embedding_requests,
            "embedding_inputs": account.embedding_inputs,
            "embedding_tokens": account.embedding_tokens,
            "spared_requests": account.spared,
            "spared_tokens": account.spared_tokens,
        }

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            name = tenant if len(self._accounts) < MOST_TENANTS else OTHER
            account = self._accounts.setdefault(name, _Account())
        return account
