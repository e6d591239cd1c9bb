"""The parts of a snapshot, for the whole server or for one tenant.

`measure` reads the server's existing folds once a second, only while a page is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.sleep import SleepState
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.report import CostReport
from headrace.observe.goodput import Goodput
from headrace.observe.readings import (
    LONGEST_GAP_SECONDS,
    WINDOW_SECONDS,
    Folds,
    Readings,
    Span,
    latency,
    read,
)
from headrace.observe.requests import RequestSummary
from headrace.observe.usage import UsageBook
from headrace.observe.work import Peaks

# Each tenant's share of the service, its usage, quota and cost, as plain values for JSON.

MOST_TENANTS = 200
"""Maximum number of tenants in a snapshot, by share of the last minute; others are only counted."""

Limits = Callable[[str], Mapping[str, Mapping[str, float]]]
"""The quotas of a tenant, by name: limit, remaining, reset_seconds."""


class TenantTable:
    """The table of tenants; ``weight`` and ``limits`` return a tenant's weight and quotas."""

    def __init__(
        self,
        usage: UsageBook,
        goodput: Goodput,
        cost: CostReport,
        weight: Callable[[str], float],
        limits: Limits,
    ) -> None:
        self._usage = usage
        self._goodput = goodput
        self._cost = cost
        self._weight = weight
        self._limits = limits

    def all(self) -> dict[str, Any]:
        """All tenants, and Jain's fairness index."""
        shares = self._goodput.tenant_shares()
        names = sorted(self._usage.tenants(), key=lambda name: (-shares.get(name, (0.0, 0.0))[0], name))
        return self._table(names[:MOST_TENANTS], self._goodput.jain, len(names))

    def one(self, tenant: str) -> dict[str, Any]:
        """One tenant, without the fairness index."""
        return self._table([tenant], None, 1)

    def _table(self, names: list[str], jain: float | None, known: int) -> dict[str, Any]:
        shares = self._goodput.tenant_shares()
        served = sum(each for each, _ in shares.values())
        return {
            "jain": jain,
            "currency": self._cost.ledger.pricing.currency,
            "tenants": [self._row(name, *shares.get(name, (0.0, 0.0)), served) for name in names],
            "more": known - len(names),
        }

    def _row(self, name: str, served: float, fair: float, total: float) -> dict[str, Any]:
        used, cost = self._usage.account(name), self._cost.sum_of(name)
        return {
            "name": name,
            "weight": self._weight(name),
            "open_requests": used["open_requests"],
            "requests": used["requests"],
            "tokens": used["computed_tokens"] + used["generated_tokens"],
            "share": served / total if total > 0.0 else 0.0,
            "fair_share": fair / total if total > 0.0 else 0.0,
            "refused": sum(used["refused"].values()),
            "cost": cost.total,
            "device_seconds": cost.device_seconds,
            "limits": self._limits(name),
        }


# The overview of one tenant: only its own requests, tokens, savings and cost.

MOST_OPEN_TENANTS = 1000
"""Maximum number of tenants with readings; when it is exceeded, all readings are dropped."""


class _Used(NamedTuple):
    """Counts of a tenant at one time."""

    at: float
    ended: int
    prompt: int
    cached: int
    generated: int


class TenantReadings:
    """The recent readings of each tenant with an open page."""

    def __init__(self, usage: UsageBook) -> None:
        self._usage = usage
        self._kept: dict[str, deque[_Used]] = {}

    def overview(
        self,
        tenant: str,
        requests: Sequence[RequestSummary],
        savings: Mapping[str, Any],
        cost: CostReport,
        now: float,
    ) -> dict[str, Any]:
        """The overview of a tenant, from its ``requests`` and ``savings``. Server-wide values are None."""
        pricing = cost.ledger.pricing
        states = [each.state for each in requests]
        return {
            "tenant": tenant,
            "running": states.count("running"),
            "waiting": states.count("waiting"),
            "slots": None,
            "rates": self._rates(tenant, now),
            "latency": latency(requests, now),
            "batch": None,
            "kv": None,
            "shares": None,
            "caches": {
                name: {"hits": layer["hits"], "hit_rate": None} for name, layer in savings["layers"].items()
            },
            "classes": None,
            "cost": None
            if not pricing.given
            else {
                "currency": pricing.currency,
                "per_million_tokens": None,
                "per_hour": None,
                "total": cost.sum_of(tenant).total,
            },
            "bottleneck": None,
        }

    def _rates(self, tenant: str, now: float) -> dict[str, float | None] | None:
        account = self._usage.account(tenant)
        used = _Used(
            now,
            sum(account["finished"].values()),
            account["computed_tokens"] + account["cached_tokens"],
            account["cached_tokens"],
            account["generated_tokens"],
        )
        if len(self._kept) >= MOST_OPEN_TENANTS and tenant not in self._kept:
            self._kept.clear()
        kept = self._kept.setdefault(tenant, deque())
        if kept and now - kept[-1].at > LONGEST_GAP_SECONDS:
            kept.clear()
        kept.append(used)
        while len(kept) > 2 and kept[1].at <= now - WINDOW_SECONDS:
            kept.popleft()
        first = kept[0]
        seconds = now - first.at
        if seconds <= 0.0:
            return None
        return {
            "requests": (used.ended - first.ended) / seconds,
            "prompt_tokens": (used.prompt - first.prompt) / seconds,
            "cached_tokens": (used.cached - first.cached) / seconds,
            "output_tokens": (used.generated - first.generated) / seconds,
            "steps": None,
        }


# The list of requests as rows: open requests, then ended ones, each newest first.

COLUMNS = (
    "id",
    "state",
    "why",
    "tenant",
    "service_class",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "age_seconds",
    "ttft_seconds",
    "preemptions",
)

MOST_ROWS = 2000
"""Maximum number of rows of a snapshot; further requests are only counted."""


def request_rows(requests: Sequence[RequestSummary], now: float) -> dict[str, Any]:
    """The rows with their columns, and how many requests are not shown (``more``)."""
    return {
        "columns": COLUMNS,
        "rows": [_row(each, now) for each in requests[:MOST_ROWS]],
        "more": max(0, len(requests) - MOST_ROWS),
    }


def _row(each: RequestSummary, now: float) -> list[Any]:
    """The values in the order of `COLUMNS`."""
    until = now if each.ended is None else each.ended
    return [
        each.id,
        each.state,
        each.why,
        each.tenant,
        each.service_class,
        each.prompt_tokens,
        each.cached_tokens,
        each.output_tokens,
        round(max(0.0, until - each.arrived), 4),
        None if each.first is None else round(each.first - each.arrived, 5),
        each.preemptions,
    ]


# The current bottleneck of the server with its reason, as a pure function of a few indicators.

IDLE_SHARE = 0.5
"""With no open request for this share of the time, the server is idle."""

GAP_SHARE = 0.3
"""With open requests but no computing step for this share of the time, the front end is the bottleneck."""

LOOP_SHARE = 0.85
"""Share of one core at which the event loop (HTTP and text) cannot keep up."""

FULL_SHARE = 0.95
"""Share of KV blocks in use at which the KV cache counts as full."""

PREEMPT_SHARE = 0.8
"""Preemptions with at least this share of KV blocks held are for lack of blocks, not for fairness."""

PREFILL_SHARE = 0.5
"""If the peaks are unknown: from this share of prefill time on, steps are bound by arithmetic, else by bandwidth."""


class Kind(StrEnum):
    """The resource that bounds the server."""

    SLOTS = "slots"
    MEMORY = "memory"
    ARITHMETIC = "arithmetic"
    BANDWIDTH = "bandwidth"
    FRONT_END = "front_end"
    IDLE = "idle"


class Signs(NamedTuple):
    """Indicators over the last seconds. Shares are 0 to 1.

    ``computing``, ``idle`` and ``gap`` divide the wall clock: steps computed, no request was open, requests were open
    but no step computed. ``loop`` is the event loop's CPU time per second. ``slots`` is the limit of running requests.
    ``blocked`` and ``preempted`` count requests that began to wait for KV blocks, and preemptions. ``prefill`` is the
    share of step time spent on prompt tokens. ``mfu`` and ``mbu`` are the utilization of peak arithmetic and bandwidth
    while steps compute (None: the peak is unknown). ``sparse``: the model has experts.
    """

    running: int
    waiting: int
    slots: int
    kv: float
    computing: float
    idle: float
    gap: float
    loop: float
    blocked: int
    preempted: int
    prefill: float
    mfu: float | None = None
    mbu: float | None = None
    sleep: SleepState = SleepState.AWAKE
    sparse: bool = False


class Bottleneck(NamedTuple):
    """A bottleneck with its reason."""

    kind: Kind
    sentence: str


def bottleneck(signs: Signs) -> Bottleneck:
    """The resource that limits the server. Sleep and queues are checked first, because their cause is certain."""
    if signs.sleep is not SleepState.AWAKE:
        freed = "its KV cache" if signs.sleep is SleepState.WEIGHTS_OFFLOADED else "its KV cache and weights"
        return Bottleneck(
            Kind.IDLE,
            f"The model sleeps: the memory of {freed} is freed, and only cached responses are served.",
        )
    if signs.waiting and signs.running >= signs.slots:
        return Bottleneck(
            Kind.SLOTS,
            f"All {_count(signs.slots, 'slot')} {_are(signs.slots)} in use and {_count(signs.waiting, 'request')} "
            f"{_wait(signs.waiting)}; steps compute {_percent(signs.computing)} of the time.",
        )
    preempted = signs.preempted and signs.kv >= PREEMPT_SHARE
    if preempted or (signs.waiting and (signs.blocked or signs.kv >= FULL_SHARE)):
        return Bottleneck(Kind.MEMORY, _memory(signs))
    if signs.idle >= IDLE_SHARE:
        return Bottleneck(Kind.IDLE, f"No request was open for {_percent(signs.idle)} of the last seconds.")
    if signs.loop >= LOOP_SHARE:
        return Bottleneck(
            Kind.FRONT_END,
            f"The event loop, which handles HTTP and text, uses {_percent(signs.loop)} of a core; steps compute "
            f"{_percent(signs.computing)} of the time.",
        )
    if signs.gap >= GAP_SHARE:
        return Bottleneck(
            Kind.FRONT_END,
            f"Requests were open but no step computed for {_percent(signs.gap)} of the time: HTTP, text and scheduling "
            "take longer than the model.",
        )
    return _device(signs)


def _memory(signs: Signs) -> str:
    held = f"{_percent(signs.kv)} of the KV blocks are held"
    if signs.preempted:
        return f"{held} and {_count(signs.preempted, 'request')} had to give up blocks in the last seconds."
    return f"{held} and {_count(signs.waiting, 'request')} {_wait(signs.waiting)} for blocks."


def _device(signs: Signs) -> Bottleneck:
    """The bottleneck when steps run without gaps: by utilization if peaks are known, else by the kind of rows."""
    if signs.mfu is not None and signs.mbu is not None:
        use = f"{_percent(signs.mfu)} of peak arithmetic and {_percent(signs.mbu)} of peak bandwidth"
        kind = Kind.ARITHMETIC if signs.mfu >= signs.mbu else Kind.BANDWIDTH
        return Bottleneck(kind, f"Steps compute {_percent(signs.computing)} of the time and use {use}.")
    if signs.prefill >= PREFILL_SHARE:
        return Bottleneck(
            Kind.ARITHMETIC,
            f"{_percent(signs.prefill)} of the step time is spent on prompt tokens, which share a read of the "
            f"weights; steps compute {_percent(signs.computing)} of the time.",
        )
    weights = "the weights of the experts that are chosen" if signs.sparse else "all weights"
    return Bottleneck(
        Kind.BANDWIDTH,
        f"{_percent(1 - signs.prefill)} of the step time is spent on decoding, which reads {weights} for one token "
        f"of each request; steps compute {_percent(signs.computing)} of the time.",
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _wait(number: int) -> str:
    return "waits" if number == 1 else "wait"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# The overview of the whole server, as plain values for JSON. None means not known yet.

MILLION = 1e6


def rates(span: Span | None) -> dict[str, float] | None:
    """Requests, tokens and steps per second."""
    if span is None:
        return None
    return {
        "requests": span.rate("ended"),
        "prompt_tokens": span.rate("prompt_tokens"),
        "cached_tokens": span.rate("cached_tokens"),
        "output_tokens": span.rate("output_tokens"),
        "steps": span.rate("steps"),
    }


def signs(span: Span, slots: int, peaks: Peaks, sparse: bool = False) -> Signs:
    """The indicators for `bottleneck`."""
    engine, shares = span.last.engine, span.shares()
    mfu, mbu = span.utilization(peaks)
    return Signs(
        engine.running,
        engine.waiting,
        slots,
        engine.kv_usage,
        shares["computing"],
        shares["idle"],
        shares["overhead"],
        span.loop_share(),
        span.blocked(),
        span.grown("preemptions"),
        span.prefill_share(),
        mfu,
        mbu,
        span.last.engine.sleep,
        sparse,
    )


def cost_now(ledger: CostLedger, span: Span | None) -> dict[str, Any] | None:
    """Current cost of a million tokens, including idle time; None without prices.

    With a device price, the cost of the wall clock is divided by the tokens served in it, cached ones included. With
    token prices only, there is only the sum.
    """
    pricing = ledger.pricing
    if not pricing.given:
        return None
    total = sum(each.cost(pricing).total for each in (*ledger.accounts.values(), *ledger.older.values()))
    per_million = None
    if span is not None and pricing.device_second:
        tokens = span.grown("prompt_tokens") + span.grown("output_tokens")
        per_million = MILLION * pricing.device_second * span.seconds / tokens if tokens > 0 else None
    return {
        "currency": pricing.currency,
        "per_million_tokens": per_million,
        "per_hour": 3600 * pricing.device_second if pricing.device_second else None,
        "total": total,
    }


def overview(
    readings: Readings,
    goodput: Goodput,
    ledger: CostLedger,
    caches: Mapping[str, Any],
    *,
    latency: Mapping[str, Any],
    slots: int,
    blocks: int,
    peaks: Peaks,
    sparse: bool = False,
) -> dict[str, Any]:
    """The whole server's overview. ``slots`` is the limit of running requests, ``blocks`` the size of the KV cache.

    ``sparse``: the model has experts.
    """
    engine, span = readings.newest.engine, readings.span()
    bounds = [int(bound) for bound in engine.batch_bounds]
    return {
        "tenant": None,
        "running": engine.running,
        "waiting": engine.waiting,
        "slots": slots,
        "rates": rates(span),
        "latency": latency,
        "batch": {"bounds": bounds, "counts": [] if span is None else span.batch()},
        "kv": {"usage": engine.kv_usage, "waste": engine.kv_waste, "blocks": blocks},
        "shares": None if span is None else span.shares(),
        "caches": {
            name: {"hits": layer["hits"], "hit_rate": layer.get("hit_rate")} for name, layer in caches.items()
        },
        "classes": [each._asdict() for each in goodput.classes()],
        "cost": cost_now(ledger, span),
        "bottleneck": None if span is None else bottleneck(signs(span, slots, peaks, sparse))._asdict(),
    }


class Dashboard:
    """Makes snapshots.

    ``slots`` returns the current limit of running requests. ``blocks`` is the number of KV blocks. ``parameters`` are
    the model's ``num_parameters``, and ``active_parameters`` of one token. ``loop_seconds`` returns
    the CPU time of the event loop's thread, on which all methods are called. ``offset`` is Unix time minus the engine's
    clock.
    """

    def __init__(
        self,
        folds: Folds,
        tenants: TenantTable,
        *,
        slots: Callable[[], int],
        blocks: int,
        parameters: Mapping[str, int],
        loop_seconds: Callable[[], float],
        offset: float,
    ) -> None:
        self._from = folds
        self._tenants = tenants
        self._slots = slots
        self._blocks = blocks
        self._parameters = parameters
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
        whole = overview(
            self._readings,
            folds.goodput,
            folds.cost.ledger,
            folds.metrics.caches.stats()["layers"],
            latency=latency(folds.book.summaries(), now),
            slots=self._slots(),
            blocks=self._blocks,
            peaks=folds.work.peaks,
            sparse=folds.work.model.sparse is not None,
        )
        return whole | {"model": self._parameters}

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
