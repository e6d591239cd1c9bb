"""Every metric and label that a file under ``deploy/`` names exists in the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.deploy.exported import registry
from tests.deploy.files import ALERTS, DASHBOARD, DEPLOY, METRIC, ROOT, alert_rules, dashboard_queries, panels

CONSTANT = {"model_name", "instance", "job"}
"""Labels that every series has: the server's own, and those that Prometheus adds."""


def unknown(query: str) -> list[str]:
    """What a query names and no server exports."""
    known, wrong = registry(), []
    labels: set[str] = set()
    for name, matchers in METRIC.findall(query):
        if name not in known:
            wrong.append(name)
            continue
        labels |= known[name]
        wrong += [
            f"{name}{{{label}}}"
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
            if label not in known[name] | CONSTANT
        ]
    for group in re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", query):
        wrong += [f"by ({label})" for label in re.findall(r"\w+", group) if label not in labels | CONSTANT]
    return wrong


@pytest.mark.parametrize("path", sorted(p for p in DEPLOY.rglob("*") if p.is_file()), ids=lambda p: p.name)
def test_every_metric_in_a_file_exists(path: Path) -> None:
    names = {name for name, _ in METRIC.findall(path.read_text(encoding="utf-8"))}
    assert names <= registry().keys()


def test_every_label_in_a_query_exists() -> None:
    queries = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alert_rules())]
    assert len(queries) > 70
    assert {title: wrong for title, query in queries if (wrong := unknown(query))} == {}


@pytest.mark.parametrize(
    "query",
    [
        "headrace:no_such_metric",
        'headrace:num_requests_running{colour="red"}',
        "sum by (colour) (headrace:num_requests_running)",
        "headrace:batch_size",
        "headrace:num_preemptions",
    ],
)
def test_a_wrong_name_is_found(query: str) -> None:
    assert unknown(query)


def test_the_dashboard_covers_what_a_server_exports() -> None:
    """A new metric gets a panel, or stands here with the reason why it has none."""
    without_panel = {
        "class_requests_running": "the sum of all classes is shown",
        "request_max_num_generation_tokens": "for vLLM's dashboards; the lengths of outputs have a panel",
        "response_cache_miss_reasons_total": "only the semantic cache tells reasons, see /v1/cache/stats",
        "response_cache_audits_total": "only with --semantic-cache, see /v1/cache/stats",
        "response_cache_refuted_total": "an alert",
        "kv_offload_failures_total": "an alert",
        "expert_tokens_total": "only with mixtures of experts, see docs/guide/models.md",
        "expert_load_imbalance": "only with mixtures of experts, see docs/guide/models.md",
        "engine_losses_total": "only after the loss of a rank or of the engine's process, see docs/guide/parallel.md",
        "recovered_requests_total": "only after such a loss, see docs/guide/parallel.md",
        "engine_sleep_state": "only while an administrator lets the model sleep, see docs/guide/serving.md",
        "response_cache_certified_hits_total": "only with --semantic-cache serve, see docs/guide/semantic-cache.md",
    }
    shown = {name for _, query in dashboard_queries() for name, _ in METRIC.findall(query)}
    families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in registry()}
    shown = {re.sub(r"_(sum|count|bucket)$", "", name) for name in shown}
    assert families - shown == without_panel.keys()


def test_panels_have_a_title_a_description_and_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]]
    assert len(ids) == len({*ids})
    for panel in panels():
        assert panel["title"]
        assert len(panel["description"]) > 10
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert all(t["datasource"]["uid"] == "${datasource}" for t in panel["targets"])


def test_every_alert_says_what_to_do_and_stands_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guide" / "deployment.md").read_text(encoding="utf-8")
    for rule in alert_rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary", "description", "action"} <= rule["annotations"].keys()
        assert f"`{rule['alert']}`" in guide, f"{ALERTS.name}: {rule['alert']} is not in the guide"
