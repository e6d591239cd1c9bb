"""Routing policies: which replica serves a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.images import contents
from headrace.core.request import Request


class ReplicaLoad(NamedTuple):
    """The load of a replica as a router sees it: open requests, and the sum of their prompt tokens."""

    open_requests: int
    open_tokens: int


class RoutingPolicy(Protocol):
    """Chooses a replica by its index; it may keep state."""

    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> int: ...


class RoundRobin:
    """The replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest open prompt tokens; the first of equals."""

    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> int:
        return min(range(len(replicas)), key=lambda i: (replicas[i].open_tokens, replicas[i].open_requests))


class PrefixAffinity:
    """The replica that last served the longest matching prefix, unless it is overloaded.

    Prompts are compared in stretches of ``chunk_tokens``; the latest ``max_entries`` stretches are kept. A replica
    is overloaded when its open tokens exceed those of the least loaded replica by ``slack_tokens`` and by
    ``imbalance`` times. Then, and for an unknown prefix, the least loaded replica is chosen.
    """

    def __init__(
        self,
        chunk_tokens: int = 256,
        max_entries: int = 1 << 18,
        slack_tokens: int = 16_384,
        imbalance: float = 1.5,
    ) -> None:
        self._chunk = chunk_tokens
        self._max_entries = max_entries
        self._slack = slack_tokens
        self._imbalance = imbalance
        self._served: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> int:
        keys = self._keys(request)
        known = next((self._served[key] for key in reversed(keys) if key in self._served), None)
        loads = [replica.open_tokens for replica in replicas]
        chosen = loads.index(min(loads))
        if known is not None and known < len(replicas):
            least = loads[chosen]
            if loads[known] <= max(least + self._slack, self._imbalance * least):
                chosen = known
        for key in keys:
            self._served[key] = chosen
            self._served.move_to_end(key)
        while len(self._served) > self._max_entries:
            self._served.popitem(last=False)
        return chosen

    def _keys(self, request: Request) -> list[bytes]:
        """The chained key of each full stretch of the prompt."""
        root = root_key(request.salt, request.adapter)
        return chained_keys(root, contents(request.tokens, request.images), self._chunk)
