from headrace.observe.http_metrics import HttpRequests
from headrace.observe.metrics_page import MetricsPage


def test_responses_are_counted_by_route_method_and_status_class() -> None:
    page = MetricsPage()
    requests = HttpRequests(page)
    for status in (200, 204, 404, 0, 503):
        requests.count("/v1/models", "GET", status)
    requests.count("unmatched", "BREW", 405)
    (family,) = page.counters
    assert {labels: cell.value for labels, cell in family.series.items()} == {
        ("/v1/models", "GET", "2xx"): 2,
        ("/v1/models", "GET", "4xx"): 2,
        ("/v1/models", "GET", "5xx"): 1,
        ("unmatched", "other", "4xx"): 1,
    }
