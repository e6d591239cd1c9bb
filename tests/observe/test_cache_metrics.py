from __future__ import annotations

import pytest

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Audited,
    Evicted,
    EvictReason,
    Fault,
    Layer,
    LookedUp,
    Lookup,
    Scope,
    Spared,
    StoreFaulted,
)
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.ports import StoreFacts
from headrace.observe.cache_metrics import CacheMetrics, ImageCounts, ImageMetrics, TimedPool
from headrace.observe.cost.prices import TokenPrices
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage

SIZES = {
    Layer.EXACT: {"memory": StoreFacts(2, 300, 1), "redis": StoreFacts(None, None, 0)},
    Layer.PREFIX: {"device": StoreFacts(5, 5000, 0)},
}


@pytest.fixture
def metrics():
    return Metrics(MetricsPage(), prices=lambda: TokenPrices(2.0, 0.0, 10.0), cache_sizes=lambda: SIZES)


def reported(metrics, *events):
    for event in events:
        metrics.fold(event, 1.0)
    return metrics.caches.stats()


def test_each_layer_counts_what_it_spared_at_the_prices_given(metrics):
    stats = reported(
        metrics,
        LookedUp("a", Layer.EXACT, Lookup.MISS, 0.25),
        LookedUp("b", Layer.EXACT, Lookup.HIT, 0.75),
        Spared("b", "t", Layer.EXACT, 1000, 100, 5.0),
        Spared("c", "t", Layer.PARTIAL, 0, 50, 0.0),
        Spared("d", "t", Layer.COALESCED, 10, 1, 0.0),
    )["layers"]
    exact = stats["exact"]
    assert (exact["hits"], exact["misses"], exact["hit_rate"]) == (1, 1, 0.5)
    assert (exact["lookups"], exact["lookup_seconds_mean"]) == (2, 0.5)
    assert (exact["saved_prompt_tokens"], exact["saved_output_tokens"]) == (1000, 100)
    assert exact["saved_cost"] == pytest.approx((1000 * 2 + 100 * 10) / 1e6)
    assert (stats["partial"]["saved_prompt_tokens"], stats["partial"]["saved_output_tokens"]) == (0, 50)
    assert stats["coalesced"]["hits"] == 1
    assert exact["stores"]["redis"] == {"entries": None, "bytes": None, "evictions": 0}


def test_a_shared_prefix_spares_its_tokens_once(metrics):
    arrivals = [Arrived(id, 100, "t", 0, 0.0) for id in "abc"]
    stats = reported(
        metrics,
        *arrivals,
        Admitted("a", AdmitReason.NEW, 0, 100, 0.0),
        Admitted("b", AdmitReason.NEW, 64, 100, 0.0),
        Admitted("b", AdmitReason.RESUMED, 96, 120, 0.0),
        Admitted("c", AdmitReason.NEW, 130, 140, 0.0),  # taken up where it was left: of the prompt, 100
    )["layers"]["prefix"]
    assert (stats["hits"], stats["misses"]) == (2, 1)
    assert (stats["saved_prompt_tokens"], stats["saved_output_tokens"]) == (164, 0)
    assert stats["saved_cost"] == pytest.approx(164 * 2 / 1e6)


def test_blocks_evicted_for_others_are_counted_and_those_reset_are_not(metrics):
    stats = reported(metrics, Evicted((1,), EvictReason.ALLOCATION), Evicted((2,), EvictReason.RESET))
    assert stats["layers"]["prefix"]["stores"]["device"] == {"entries": 5, "bytes": 5000, "evictions": 1}


def test_bypasses_and_failures_are_reported_with_their_reason(metrics):
    stats = reported(
        metrics,
        LookedUp("a", Layer.EXACT, Lookup.BYPASS, 0.0, "no_store"),
        StoreFaulted("redis", Fault.SLOW),
    )
    assert stats["bypasses"] == {"no_store": 1}
    assert stats["faults"] == {"redis:slow": 1}
    assert stats["layers"]["exact"]["lookups"] == 0


def test_audits_and_what_they_refute(metrics):
    semantic = reported(
        metrics,
        LookedUp("a", Layer.SEMANTIC, Lookup.MISS, 0.0, "audit"),
        Audited("a", Layer.SEMANTIC, True),
        Audited("b", Layer.SEMANTIC, False, Scope.PARTITION),
        Audited("c", Layer.SEMANTIC, False, Scope.TENANT),
        Audited("d", Layer.SEMANTIC, False),
    )["layers"]["semantic"]
    assert (semantic["audited_right"], semantic["audited_wrong"]) == (1, 3)
    assert semantic["refuted"] == {"partition": 1, "tenant": 1}


def test_the_page_has_a_series_per_layer():
    sheet = MetricsPage()
    metrics = Metrics(sheet, cache_sizes=lambda: SIZES)
    reported(metrics, Spared("b", "t", Layer.EXACT, 1000, 100, 5.0), Evicted((1,), EvictReason.ALLOCATION))
    page = sheet.render().decode()
    assert 'headrace:response_cache_hits_total{layer="exact"} 1.0' in page
    assert 'headrace:response_cache_bytes{layer="exact"} 300.0' in page
    assert 'headrace:response_cache_evictions_total{layer="prefix"} 1.0' in page


def test_counts_are_read_when_the_page_is_rendered():
    page, counts = MetricsPage(constant={}), [ImageCounts(0, 0, 0, 0.0)]
    ImageMetrics(page, lambda: counts[0])
    counts[0] = ImageCounts(5, 3, 1000, 0.25)
    lines = page.render().decode().splitlines()
    assert {line for line in lines if not line.startswith("#")} == {
        "headrace:mm_cache_queries_total 5.0",
        "headrace:mm_cache_hits_total 3.0",
        "headrace:mm_cache_bytes 1000.0",
        "headrace:image_encoder_seconds_total 0.25",
    }


def test_each_lookup_is_counted_and_shown_as_that_of_the_layer() -> None:
    pool = TimedPool(4, 2, LeastRecentlyUsed(), lambda event: None)
    page = MetricsPage()
    caches = CacheMetrics(page)
    caches.time_prefix(pool.lookups)
    for _ in range(3):
        assert pool.match(b"root", (), (1, 2, 3), 2).blocks == ()
    assert 'response_cache_lookup_seconds_count{layer="prefix"} 3.0' in page.render().decode()
    caches.shared(0)
    assert caches.stats()["layers"]["prefix"]["lookups"] == 3
