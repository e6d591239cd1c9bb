"""The time of lookups in the prefix cache."""

from __future__ import annotations

from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.observe.cache_metrics import CacheMetrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.prefix_lookups import TimedPool


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
