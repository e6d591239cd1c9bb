"""A real Prometheus scrapes a real server under load: every query of the dashboard and of the alerts returns data."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.files import METRIC, alert_rules, dashboard_queries
from tests.deploy.load import TENANTS_FILE, send
from tests.deploy.prometheus import Prometheus, scraping, wait_for
from tests.server.conftest import serving

WINDOW = "10m"
"""Stands in for Grafana's ``$__rate_interval`` and for the windows of the alerts: the load is in it."""

NO_DATA = {
    'headrace:request_success_total{finished_reason=~"failed|timeout"}': "no request fails or times out",
    "headrace:kv_offload_failures_total": "needs a disk that fails",
    "headrace:response_cache_refuted_total": "needs a semantic cache whose audits failed",
}
"""Selectors of the alerts that match nothing on a healthy server, with the reason."""


NOT_HERE = {
    "Bytes between ranks": "one rank",
    "Device memory": "needs a GPU",
    "Device utilization": "needs a GPU",
    "Power": "needs counters of energy",
    "Energy per token": "needs counters of energy",
    "Drafting stopped": "needs drafts of which none pays, and a length that is not fixed",
}
"""Panels whose queries return nothing on this server, with the reason."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after three waves of load, each seen by at least one scrape."""
    tenants: Path = tmp_path_factory.mktemp("deploy") / "tenants.yml"
    tenants.write_text(TENANTS_FILE)
    with socket.socket() as closed:  # bound and not listening: a cache store that is down
        closed.bind(("127.0.0.1", 0))
        flags = ["--response-cache", "memory", "--response-cache-secret", "for this test"]
        flags += ["--response-cache", f"redis://127.0.0.1:{closed.getsockname()[1]}/0"]
        flags += ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(2**20), "--max-model-len", "640"]
        flags += ["--kv-offload-bytes", str(2**22)]
        flags += ["--max-num-seqs", "4", "--max-num-queued-reqs", "16", "--tenants", str(tenants)]
        flags += ["--embedding-model", "builtin", "--peak-flops", "1e12", "--peak-bandwidth", "1e10"]
        drafts = '{"method": "suffix", "num_speculative_tokens": 3, "adaptive": false}'  # in every wave
        flags += ["--speculative-config", drafts]
        flags += ["--price-per-million-prompt-tokens", "1", "--price-per-million-output-tokens", "2"]
        with serving(*flags) as server, scraping(server.url.removeprefix("http://")) as running:
            for wave in (1, 2, 2):  # the repeated wave finds its answers in the cache
                statuses = send(server.url, wave)
                assert statuses[200] > 10, statuses
                assert statuses.get(500, 0) == 0, statuses
                count = server.metric("request_success_total")
                wait_for(lambda count=count: seen(running) >= count, "Prometheus to see the wave")
            yield running


def seen(prometheus: Prometheus) -> float:
    """How many finished requests the newest scrape counted."""
    return sum(float(each["value"][1]) for each in prometheus.query("sum(headrace:request_success_total)"))


def resolved(query: str) -> str:
    """A query as Grafana would send it with everything selected."""
    query = query.replace("$__rate_interval", WINDOW).replace("$instance", ".*").replace("$model", ".*")
    assert "$" not in query
    return query


def numbers(prometheus: Prometheus, query: str) -> list[float]:
    return [value for each in prometheus.query(query) if not math.isnan(value := float(each["value"][1]))]


def first_numbers(prometheus: Prometheus, query: str) -> list[float]:
    """What a query returns as soon as it returns something: after a slow scrape, gauges are absent for a moment."""
    found: list[float] = []

    def asked() -> bool:
        found.extend(numbers(prometheus, query))
        return bool(found)

    wait_for(asked, query)
    return found


def test_every_query_of_the_dashboard_returns_data(prometheus: Prometheus) -> None:
    assert NOT_HERE.keys() <= {title for title, _ in dashboard_queries()}
    queries = [resolved(query) for title, query in dashboard_queries() if title not in NOT_HERE]
    assert len(queries) > 90
    for query in queries:
        assert first_numbers(prometheus, query)


@pytest.mark.parametrize(
    "title",
    [
        *("Tokens per second", "Requests per second by outcome", "Rejected requests"),
        *("Time to first token", "End-to-end latency", "Wait reasons", "Batch size", "Store faults"),
        *("Hits by layer", "Prefix cache hit rate", "Tokens by tenant", "Requests inside their SLO"),
    ],
)
def test_the_load_shows_on_the_dashboard(prometheus: Prometheus, title: str) -> None:
    queries = [resolved(query) for each, query in dashboard_queries() if each == title]
    assert queries
    assert all(max(first_numbers(prometheus, query)) > 0 for query in queries)


def test_tenants_and_layers_have_separate_series(prometheus: Prometheus) -> None:
    tenants = prometheus.query(f"max_over_time(headrace:tenant_service_tokens_total[{WINDOW}])")
    assert {"acme", "globex", "initech"} <= {each["metric"]["tenant"] for each in tenants}
    layers = prometheus.query(f"max_over_time(headrace:response_cache_hits_total[{WINDOW}]) > 0")
    assert {"exact", "coalesced", "prefix"} <= {each["metric"]["layer"] for each in layers}


def test_prometheus_evaluates_every_alert(prometheus: Prometheus) -> None:
    wait_for(lambda: all(rule["evaluationTime"] for rule in prometheus.rules()), "the rules' evaluation")
    rules = {rule["name"]: rule for rule in prometheus.rules()}
    assert rules.keys() == {rule["alert"] for rule in alert_rules()}
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}
    assert rules["HeadraceNoTarget"]["state"] == "inactive"
    assert "firing" not in (rules["HeadraceDown"]["state"], rules["HeadraceNoStepProgress"]["state"])


def test_every_metric_of_an_alert_has_data(prometheus: Prometheus) -> None:
    selectors = {match[0] for rule in alert_rules() for match in METRIC.finditer(rule["expr"])}
    assert len(selectors) > 10
    for selector in selectors - NO_DATA.keys():
        first_numbers(prometheus, selector)
    assert not [selector for selector in NO_DATA if prometheus.query(selector)]
    assert NO_DATA.keys() <= selectors
