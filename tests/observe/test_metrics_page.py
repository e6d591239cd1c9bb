from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.events import AdmitReason, Admitted, Arrived, Emitted, Finished
from headrace.core.request import FinishReason
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage, aliases, labels


def test_process_metrics_have_the_names_that_dashboards_know() -> None:
    page = MetricsPage("headrace", {"model_name": "toy"})
    page.add_process()
    text = page.render().decode()
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f"\n{name} " in text
    assert "python_gc_collections_total{generation=" in text


def test_values_are_measured_when_the_page_is_rendered() -> None:
    page = MetricsPage()
    gauge = page.gauge("size", "A size.").of()
    page.before_render(lambda: setattr(gauge, "value", gauge.value + 1))
    assert "headrace:size 1.0" in page.render().decode()
    assert "headrace:size 2.0" in page.render().decode()


READ = {
    "e2e_request_latency_seconds_bucket": {"model_name", "le"},
    "e2e_request_latency_seconds_sum": {"model_name"},
    "e2e_request_latency_seconds_count": {"model_name"},
    "prompt_tokens_total": {"model_name"},
    "generation_tokens_total": {"model_name"},
    "time_per_output_token_seconds_bucket": {"model_name", "le"},
    "time_per_output_token_seconds_sum": {"model_name"},
    "time_per_output_token_seconds_count": {"model_name"},
    "inter_token_latency_seconds_bucket": {"model_name", "le"},
    "inter_token_latency_seconds_sum": {"model_name"},
    "inter_token_latency_seconds_count": {"model_name"},
    "num_requests_running": {"model_name"},
    "num_requests_waiting": {"model_name"},
    "time_to_first_token_seconds_bucket": {"model_name", "le"},
    "time_to_first_token_seconds_sum": {"model_name"},
    "time_to_first_token_seconds_count": {"model_name"},
    "gpu_cache_usage_perc": {"model_name"},
    "kv_cache_usage_perc": {"model_name"},
    "gpu_prefix_cache_queries_total": {"model_name"},
    "gpu_prefix_cache_hits_total": {"model_name"},
    "prefix_cache_queries_total": {"model_name"},
    "prefix_cache_hits_total": {"model_name"},
    "request_prompt_tokens_bucket": {"model_name", "le"},
    "request_generation_tokens_bucket": {"model_name", "le"},
    "request_success_total": {"model_name", "finished_reason"},
    "request_queue_time_seconds_sum": {"model_name"},
    "request_prefill_time_seconds_sum": {"model_name"},
    "request_decode_time_seconds_sum": {"model_name"},
    "request_max_num_generation_tokens_sum": {"model_name"},
    "cache_config_info": {"model_name", "block_size", "num_gpu_blocks"},
}

STORY = (
    (10.0, Arrived("a", 40, "acme", 0)),
    (11.0, Admitted("a", AdmitReason.NEW, 16, 40)),
    (12.0, Emitted("a", (7,))),
    (13.0, Emitted("a", (8, 9))),
    (15.0, Finished("a", FinishReason.STOP, 40, 3, 16)),
)


def page_of(prefix: str) -> str:
    page = MetricsPage(prefix, labels(prefix, "toy"), aliases(prefix))
    metrics = Metrics(page, cache_config={"block_size": "16", "num_gpu_blocks": "100"})
    for now, event in STORY:
        metrics.fold(event, now)
    return page.render().decode()


def samples(prefix: str) -> dict[str, list]:
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(page_of(prefix)):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.mark.parametrize("name", READ)
def test_a_metric_that_is_read_exists_with_its_labels_and_a_value(name: str) -> None:
    found = samples("vllm")[f"vllm:{name}"]
    assert all(sample.labels.keys() >= READ[name] | {"engine"} for sample in found)
    assert {sample.labels["model_name"] for sample in found} == {"toy"}
    if not name.startswith(("num_requests", "kv_cache_usage", "gpu_cache_usage")):  # all is over
        assert any(sample.value > 0 for sample in found)


def test_an_alias_has_the_values_and_the_kind_of_its_metric() -> None:
    found = samples("vllm")
    for old, name in (
        ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("time_per_output_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    ):
        assert [(s.labels, s.value) for s in found[f"vllm:{old}"]] == [
            (s.labels, s.value) for s in found[f"vllm:{name}"]
        ]
    text = page_of("vllm")
    assert "# TYPE vllm:gpu_prefix_cache_hits_total counter" in text
    assert "# TYPE vllm:time_per_output_token_seconds histogram" in text
    assert "# TYPE vllm:gpu_cache_usage_perc gauge" in text


def test_our_own_prefix_has_neither_aliases_nor_the_engine_label() -> None:
    found = samples("headrace")
    assert "headrace:gpu_cache_usage_perc" not in found
    assert all("engine" not in sample.labels for each in found.values() for sample in each)
