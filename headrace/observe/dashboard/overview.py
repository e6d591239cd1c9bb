"""The overview of the whole server, as plain values for JSON. None means not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.observe.cost.ledger import CostLedger
from headrace.observe.dashboard.bottleneck import Signs, bottleneck
from headrace.observe.dashboard.reading import Readings, Span
from headrace.observe.goodput import Goodput
from headrace.observe.resources.work import Peaks

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


def signs(span: Span, slots: int, peaks: Peaks) -> Signs:
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
) -> dict[str, Any]:
    """The whole server's overview. ``slots`` is the limit of running requests, ``blocks`` the size of the KV cache."""
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
        "bottleneck": None if span is None else bottleneck(signs(span, slots, peaks))._asdict(),
    }
