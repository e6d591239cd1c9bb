from headrace.observe.images import ImageCounts, ImageMetrics
from headrace.observe.metrics_page import MetricsPage


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
