"""The metrics fold on event lists made by hand: every figure can be worked out on paper."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    EngineLost,
    Evicted,
    EvictReason,
    Finished,
    LostPart,
    Moved,
    MoveReason,
    Preempted,
    PreemptReason,
    RestoreDeclined,
    Skipped,
    SkipReason,
    Stepped,
    TransferFailed,
)
from headrace.core.plan import Tier
from headrace.core.request import FinishReason
from headrace.observe.engine_series import expert_load
from headrace.observe.metrics import AdapterRequests, HttpRequests, Metrics
from headrace.observe.metrics_page import MetricsPage

STORY = (
    (10.0, Arrived("a", 40, "acme", 0)),
    (10.5, Skipped("a", SkipReason.NO_BLOCKS)),
    (11.0, Admitted("a", AdmitReason.NEW, 16, 40)),
    (11.0, Chunked("a", 16, 24, ChunkReason.WHOLE)),
    (12.0, Emitted("a", (7,))),
    (12.0, Stepped(1, 0, 1, 24, 1, 0, 3, 10, 48, 40)),
    (12.5, Emitted("a", (8,))),
    (12.5, Preempted("a", PreemptReason.NO_BLOCKS, 41)),
    (13.0, Admitted("a", AdmitReason.RESUMED, 32, 42)),
    (13.0, Chunked("a", 32, 10, ChunkReason.WHOLE)),
    (14.0, Emitted("a", (9, 10))),
    (15.0, Finished("a", FinishReason.STOP, 40, 4, 16)),
    (15.0, Stepped(2, 0, 1, 10, 0, 0, 0, 10, 0, 0)),
)


def page(sheet: MetricsPage) -> dict[str, float]:
    """Every sample of the rendered page by its name and labels, the model's name left out."""
    samples = {}
    for family in text_string_to_metric_families(sheet.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def reported(prefix: str = "headrace", upto: int = len(STORY)) -> dict[str, float]:
    sheet = MetricsPage(prefix, {"model_name": "toy"})
    metrics = Metrics(sheet, clock_offset=1000.0)
    for now, event in STORY[:upto]:
        metrics.fold(event, now)
    return page(sheet)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix_cache_queries_total", 40),
        ("prefix_cache_hits_total", 16),
        ("num_preemptions_total", 1),
        ("recomputed_tokens_total", 41 - 32),
        ("prompt_tokens_total", 40),
        ("generation_tokens_total", 4),
        ("request_success_total{finished_reason=stop}", 1),
        ("scheduler_wait_reason_total{reason=no_blocks}", 1),
        ("tenant_service_tokens_total{kind=computed,tenant=acme}", 24 + 10),
        ("tenant_service_tokens_total{kind=cached,tenant=acme}", 16),
        ("tenant_service_tokens_total{kind=generated,tenant=acme}", 4),
        ("num_requests_running", 0),
        ("num_requests_waiting", 0),
        ("kv_cache_usage_perc", 0),
        ("scheduler_last_progress_timestamp_seconds", 1015.0),
        ("iteration_tokens_total_count", 2),
        ("iteration_tokens_total_sum", 34),
        ("batch_size_sum", 2),
        ("time_to_first_token_seconds_sum{class=default}", 2.0),
        ("time_to_first_token_seconds_count{class=default}", 1),
        ("inter_token_latency_seconds_sum{class=default}", 2.0),
        ("inter_token_latency_seconds_count{class=default}", 2),
        ("request_time_per_output_token_seconds_sum", 2.0 / 3),
        ("e2e_request_latency_seconds_sum{class=default}", 5.0),
        ("request_queue_time_seconds_sum", 1.0),
        ("request_prefill_time_seconds_sum", 1.0),
        ("request_decode_time_seconds_sum", 2.0),
        ("request_prompt_tokens_sum", 40),
        ("request_generation_tokens_sum", 4),
    ],
)
def test_one_request_from_arrival_to_end(name: str, value: float) -> None:
    assert reported()[f"headrace:{name}"] == pytest.approx(value)


def test_gauges_while_it_runs_and_while_it_waits_again() -> None:
    running = reported(upto=6)
    assert (running["headrace:num_requests_running"], running["headrace:num_requests_waiting"]) == (1, 0)
    assert running["headrace:kv_cache_usage_perc"] == pytest.approx(0.3)
    assert running["headrace:kv_cache_waste_perc"] == pytest.approx(8 / 48)
    waiting = reported(upto=8)
    assert (waiting["headrace:num_requests_running"], waiting["headrace:num_requests_waiting"]) == (0, 1)


def test_the_prefix_is_chosen_and_the_model_is_a_label() -> None:
    sheet = MetricsPage("vllm", {"model_name": "toy"})
    Metrics(sheet)
    text = sheet.render().decode()
    assert 'vllm:num_requests_running{model_name="toy"} 0.0' in text
    assert "headrace:" not in text
    assert "_created" not in text


def test_a_histogram_bucket_takes_its_upper_end() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    metrics.fold(Arrived("a", 1, "t", 0), 0.0)
    metrics.fold(Emitted("a", (1,)), 0.25)
    buckets = {k: v for k, v in page(sheet).items() if k.startswith("headrace:time_to_first_token_seconds_b")}
    assert buckets["headrace:time_to_first_token_seconds_bucket{class=default,le=0.1}"] == 0
    assert buckets["headrace:time_to_first_token_seconds_bucket{class=default,le=0.25}"] == 1
    assert buckets["headrace:time_to_first_token_seconds_bucket{class=default,le=+Inf}"] == 1


def test_latencies_are_counted_by_class() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet, classes=("priority", "flex"))
    for name, service_class, first in (("a", "priority", 1.0), ("b", "flex", 3.0)):
        metrics.fold(Arrived(name, 1, "t", 0, service_class=service_class), 0.0)
        metrics.fold(Emitted(name, (1,)), first)
        metrics.fold(Emitted(name, (2,)), first + 2 * first)
        metrics.fold(Finished(name, FinishReason.STOP, 1, 2, 0), 4 * first)
    found = page(sheet)
    for name, first in (("priority", 1.0), ("flex", 3.0)):
        assert found[f"headrace:time_to_first_token_seconds_sum{{class={name}}}"] == first
        assert found[f"headrace:inter_token_latency_seconds_sum{{class={name}}}"] == 2 * first
        assert found[f"headrace:e2e_request_latency_seconds_sum{{class={name}}}"] == 4 * first


def test_a_class_has_its_latencies_before_its_first_request() -> None:
    sheet = MetricsPage()
    Metrics(sheet, classes=("priority",))
    assert page(sheet)["headrace:time_to_first_token_seconds_count{class=priority}"] == 0


def test_classes_beyond_the_limit_share_one_label() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    for number in range(150):
        metrics.fold(Arrived(f"r{number}", 1, "t", 0, service_class=f"class{number}"), 0.0)
        metrics.fold(Emitted(f"r{number}", (1,)), 1.0)
    counts = {
        k: v for k, v in page(sheet).items() if k.startswith("headrace:time_to_first_token_seconds_count")
    }
    assert len(counts) == 101
    assert counts["headrace:time_to_first_token_seconds_count{class=other}"] == 50


def test_evictions_of_device_blocks_are_counted_by_reason() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    metrics.fold(Evicted((1, 2, 3), EvictReason.ALLOCATION), 0.0)
    metrics.fold(Evicted((4,), EvictReason.RESET), 0.0)
    found = page(sheet)
    assert found["headrace:kv_cache_evicted_blocks_total{reason=allocation}"] == 3
    assert found["headrace:kv_cache_evicted_blocks_total{reason=reset}"] == 1


def test_the_runner_tells_its_padding_and_the_bytes_between_ranks() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    metrics.runner.measure(5, {"all_reduce": 100, "tokens": 8})
    metrics.runner.measure(7, {"all_reduce": 300, "tokens": 8})
    found = page(sheet)
    assert found["headrace:padding_tokens_total"] == 7
    assert found["headrace:collective_bytes_total{operation=all_reduce}"] == 300


def test_the_load_of_experts_is_that_of_the_busiest_beside_the_mean() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    metrics.runner.measure(0, {})
    assert page(sheet)["headrace:expert_load_imbalance{layers=mean}"] == 0
    metrics.runner.measure(0, {}, expert_load([[0, 0], [2, 2, 2, 2], [7, 1]]))  # no token yet, even, and not
    found = page(sheet)
    assert found["headrace:expert_tokens_total"] == 16
    assert found["headrace:expert_load_imbalance{layers=mean}"] == 1.375
    assert found["headrace:expert_load_imbalance{layers=largest}"] == 1.75


def test_tenants_beyond_the_limit_share_one_label() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet, tenants=2)
    for number in range(50):
        metrics.fold(Arrived(str(number), 1, f"tenant-{number}", 0), 0.0)
    for number in range(50):
        metrics.fold(Admitted(str(number), AdmitReason.NEW, 0, 1), 0.5)
        metrics.fold(Chunked(str(number), 0, 1, ChunkReason.WHOLE), 0.5)
        metrics.fold(Emitted(str(number), (1,)), 1.0)
    reported = page(sheet)
    for kind in ("generated", "computed"):  # a tenant is told apart in all kinds or in none
        series = {k: v for k, v in reported.items() if "tenant_service" in k and f"kind={kind}" in k}
        name = "headrace:tenant_service_tokens_total{kind=%s,tenant=%s}"
        assert series == {
            name % (kind, "tenant-0"): 1,
            name % (kind, "tenant-1"): 1,
            name % (kind, "other"): 50 - 2,
        }


def test_a_request_refused_before_it_arrived_is_counted_and_harms_nothing() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    metrics.fold(Finished("x", FinishReason.REJECTED, 5, 0, 0, "too long"), 1.0)
    samples = page(sheet)
    assert samples["headrace:request_success_total{finished_reason=rejected}"] == 1
    assert samples["headrace:num_requests_waiting"] == 0


def test_phases_and_cache_config() -> None:
    seconds = {"plan": 1.0, "forward": 2.0}
    sheet = MetricsPage()
    metrics = Metrics(
        sheet, cache_config={"block_size": "16", "num_gpu_blocks": "100"}, phase_seconds=lambda: seconds
    )
    for plan, forward in ((1.0005, 2.01), (1.002, 2.02)):
        seconds.update(plan=plan, forward=forward)
        metrics.fold(Stepped(0, 1, 0, 1, 1, 0, 1, 8, 16, 16), 1.0)
    samples = page(sheet)
    assert samples["headrace:scheduler_step_seconds_sum{phase=plan}"] == pytest.approx(0.002)
    assert samples["headrace:scheduler_step_seconds_count{phase=forward}"] == 2
    assert samples["headrace:cache_config_info{block_size=16,num_gpu_blocks=100}"] == 1


def test_what_one_step_tells_at_once_happened_at_its_own_times() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    for event in (
        Arrived("a", 4, "t", 0, at=1.0),
        Admitted("a", AdmitReason.NEW, 0, 4, at=1.5),
        Emitted("a", (1,)),
        Finished("a", FinishReason.LENGTH, 4, 1, 0),
    ):
        metrics.fold(event, 3.0)
    samples = page(sheet)
    assert samples["headrace:request_queue_time_seconds_sum"] == pytest.approx(0.5)
    assert samples["headrace:request_prefill_time_seconds_sum"] == pytest.approx(1.5)
    assert samples["headrace:time_to_first_token_seconds_sum{class=default}"] == pytest.approx(2.0)
    assert samples["headrace:e2e_request_latency_seconds_sum{class=default}"] == pytest.approx(2.0)


def test_a_tenants_nul_does_not_end_the_page() -> None:
    sheet = MetricsPage()
    family = sheet.counter("service", "Service.", ["tenant"])
    family.of("a\0b").value += 1
    family.of("a\0b").value += 1
    assert b"\0" not in sheet.render()
    assert 'headrace:service_total{tenant="a\ufffdb"} 2.0'.encode() in sheet.render()


def test_a_request_that_lost_its_memory_was_not_preempted_but_recovered():
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    for now, event in STORY[:7]:
        metrics.fold(event, now)
    metrics.fold(Preempted("a", PreemptReason.LOST, 41), 12.5)
    metrics.fold(EngineLost(LostPart.PROCESS, "its process ended by SIGKILL", 1, 0), 12.5)
    shown = page(sheet)
    assert shown["headrace:num_preemptions_total"] == 0
    assert shown["headrace:recovered_requests_total"] == 1
    assert shown["headrace:engine_losses_total{part=process}"] == 1
    assert shown["headrace:engine_losses_total{part=rank}"] == 0
    assert (shown["headrace:num_requests_running"], shown["headrace:num_requests_waiting"]) == (0, 1)


def test_copies_between_tiers_are_counted_in_bytes_and_what_they_were_good_for() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet)
    for event in (
        Moved(Tier.DEVICE, Tier.HOST, 1, 100, MoveReason.EVICTED),
        Moved(Tier.DEVICE, Tier.HOST, 1, 100, MoveReason.EVICTED),
        Moved(Tier.HOST, Tier.DEVICE, 3, 300, MoveReason.RESTORED, "r"),
        RestoreDeclined("r", 32),
        TransferFailed(Tier.HOST, Tier.DISK),
    ):
        metrics.fold(event, 1.0)
    shown = page(sheet)
    moved = "headrace:kv_offload_bytes_total"
    assert shown[f"{moved}{{reason=evicted,source=device,target=host}}"] == 200
    assert shown[f"{moved}{{reason=restored,source=host,target=device}}"] == 300
    assert shown["headrace:kv_offload_hits_total"] == 3
    assert shown["headrace:kv_offload_declined_tokens_total"] == 32
    assert shown["headrace:kv_offload_failures_total{source=host,target=disk}"] == 1


def test_the_labels_list_adapters_of_running_and_waiting_requests() -> None:
    page = MetricsPage("vllm")
    watcher = AdapterRequests(page, 4, {"d1": "sql", "d2": "chat"}.__getitem__, lambda: 1700.0)
    for name, adapter in (("a", "d1"), ("b", "d2"), ("c", "d1"), ("d", "")):
        watcher.fold(Arrived(name, 1, "t", 0, adapter=adapter), 0.0)
    for name in "abd":
        watcher.fold(Admitted(name, AdmitReason.NEW, 0, 1), 1.0)

    def line() -> str:
        (found,) = [
            row for row in page.render().decode().splitlines() if row.startswith("vllm:lora_requests_info{")
        ]
        return found

    assert line() == (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="chat,sql",waiting_lora_adapters="sql"} 1700.0'
    )
    watcher.fold(Preempted("b", PreemptReason.NO_BLOCKS, 1), 2.0)
    watcher.fold(Finished("a", FinishReason.STOP, 1, 1, 0), 3.0)
    assert 'running_lora_adapters="",waiting_lora_adapters="chat,sql"' in line()
    for name in "bcd":
        watcher.fold(Finished(name, FinishReason.STOP, 1, 1, 0), 4.0)
    assert 'running_lora_adapters="",waiting_lora_adapters=""' in line()


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
