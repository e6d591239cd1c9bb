"""Pairs of requests that the semantic cache took for the same, for people to label: their form, and their labels.

A pair has both questions and no answer. Its ``id`` names tenant, partition and questions: each pair is recorded once. A
labelled line is a recorded line with ``label``; every other field must be as it was recorded. Pure.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.response_cache.rules.guards import said

# The served model's verdicts on pairs of requests, and the pairs that wait for one.
#
# The model is asked in idle time, so a pair that is seen for the first time is a miss. Pairs are known by
# `pair_key`: the partition and what both questions say, without politeness, articles, capitals and the order
# of the two. Memory is bounded; if it is full, the tenant with the most loses its oldest. Pure: it computes
# nothing and knows no model.

MOST_VERDICTS = 20_000
"""Verdicts remembered, about 150 bytes each."""
MOST_WAITING = 256
"""Pairs of all tenants that wait for a verdict; further pairs of the tenant with the most are not asked about."""

ValueT = TypeVar("ValueT")


class Pair(NamedTuple):
    """Two questions of one partition of a tenant."""

    tenant: str
    partition: bytes
    asked: str
    cached: str


def pair_key(pair: Pair) -> bytes | None:
    """The key of a pair; None if both say the same, which needs no verdict."""
    one, other = sorted((said(pair.asked), said(pair.cached)))
    if one == other:
        return None
    return hashlib.sha256(repr((pair.partition, one, other)).encode()).digest()[:16]


class Verdicts:
    """Verdicts by pair; each tenant has its own.

    Args:
        most: verdicts remembered.
        most_waiting: pairs that wait for one.
    """

    def __init__(self, most: int = MOST_VERDICTS, most_waiting: int = MOST_WAITING) -> None:
        self._known: ByTenant[bool] = ByTenant(most)
        self._waiting: ByTenant[Pair] = ByTenant(most_waiting)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def waiting(self) -> int:
        """The number of pairs that wait for a verdict."""
        return len(self._waiting)

    def of(self, pair: Pair) -> bool | None:
        """Whether the two have one answer; None without a verdict: the pair waits for one from now on."""
        key = pair_key(pair)
        if key is None:
            return True
        verdict = self._known.get(pair.tenant, key)
        if verdict is None and self._waiting.get(pair.tenant, key) is None:
            self._waiting.put(pair.tenant, key, pair)
        return verdict

    def next(self) -> Pair | None:
        """Take the next pair that waits: of the tenants in turn, each one's oldest."""
        return self._waiting.take()

    def settle(self, pair: Pair, same: bool) -> None:
        """Remember a verdict."""
        key = pair_key(pair)
        if key is not None:
            self._known.put(pair.tenant, key, same)


class ByTenant(Generic[ValueT]):
    """At most ``most`` values of all tenants; what is used or put least recently by the tenant with the most goes
    first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: OrderedDict[str, OrderedDict[bytes, ValueT]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, tenant: str, key: bytes) -> ValueT | None:
        """A value, which counts as used."""
        own = self._tenants.get(tenant)
        if own is None or key not in own:
            return None
        own.move_to_end(key)
        return own[key]

    def values(self, tenant: str | None = None) -> list[ValueT]:
        """All values, or those of one tenant, each tenant's least recently used first."""
        names = list(self._tenants) if tenant is None else [tenant] if tenant in self._tenants else []
        return [value for name in names for value in self._tenants[name].values()]

    def put(self, tenant: str, key: bytes, value: ValueT) -> None:
        """Add or replace a value."""
        own = self._tenants.setdefault(tenant, OrderedDict())
        self._count += key not in own
        own[key] = value
        own.move_to_end(key)
        if self._count > self._most:
            largest = max(self._tenants, key=lambda name: len(self._tenants[name]))
            self._take_from(largest)

    def take(self) -> ValueT | None:
        """Remove the oldest value of the tenant whose turn it is."""
        if not self._tenants:
            return None
        tenant = next(iter(self._tenants))
        self._tenants.move_to_end(tenant)
        return self._take_from(tenant)

    def _take_from(self, tenant: str) -> ValueT:
        own = self._tenants[tenant]
        _, value = own.popitem(last=False)
        self._count -= 1
        if not own:
            del self._tenants[tenant]
        return value


LABELS = {"same": True, "different": False}
"""Labels, and whether the cached answer would have been right."""

MOST_TEXT = 100_000
"""Characters of a question."""


class SeenPair(NamedTuple):
    """Two questions of a tenant, the second of which was asked, and the decision.

    ``verdict`` is ``serve``, or why not: ``judge_refused``, or the guard that forbids it. ``entries`` is the size of
    the partition, ``score`` the score of a candidate (None if a guard forbids it), ``least`` the threshold then.
    ``basis`` names what the score was made with.
    """

    id: str
    tenant: str
    cached: str
    asked: str
    similarity: float
    verdict: str
    entries: int
    score: float | None
    least: float
    basis: str

    def to_json(self) -> dict[str, Any]:
        """The line to export; ``label`` is to be filled in."""
        return {**self._asdict(), "label": None}


class BadLine(ValueError):
    """A line that is no labelled pair; the message names the field."""


def pair_id(tenant: str, partition: bytes, cached: str, asked: str) -> str:
    """The id of a pair."""
    named = json.dumps([tenant, partition.hex(), cached, asked])
    return hashlib.sha256(named.encode()).hexdigest()[:32]


def read_pair(line: str) -> tuple[SeenPair, bool] | None:
    """The pair of a line and whether it is labelled the same; None if it is not labelled.

    Raises:
        BadLine: it is not a labelled pair.
    """
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadLine("expected an object")
    expected = {*SeenPair._fields, "label"}
    if missing := sorted(expected - content.keys()):
        raise BadLine(f"{missing[0]}: missing")
    if unknown := sorted(content.keys() - expected):
        raise BadLine(f"{unknown[0][:50]}: unknown field")
    label = content["label"]
    if label is None:
        return None
    if not isinstance(label, str) or label not in LABELS:
        raise BadLine(f"label: expected same or different, got {json.dumps(label)[:50]}")
    return _checked(content), LABELS[label]


def _checked(content: Mapping[str, Any]) -> SeenPair:
    for name in ("id", "tenant", "cached", "asked", "verdict", "basis"):
        if not isinstance(content[name], str) or len(content[name]) > MOST_TEXT:
            raise BadLine(f"{name}: expected text of at most {MOST_TEXT} characters")
    entries, score = content["entries"], content["score"]
    if not isinstance(entries, int) or isinstance(entries, bool) or entries < 0:
        raise BadLine("entries: expected a number of entries")
    for name in ("similarity", "least", *(() if score is None else ("score",))):
        value = content[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise BadLine(f"{name}: expected a finite number")
    if content["verdict"] == "serve" and (score is None or score < content["least"]):
        raise BadLine("score: a pair that would be served has a score from least on")
    return SeenPair(*(content[name] for name in SeenPair._fields))
