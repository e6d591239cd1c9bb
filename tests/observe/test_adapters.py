from __future__ import annotations

from headrace.core.events import AdmitReason, Admitted, Arrived, Finished, Preempted, PreemptReason
from headrace.core.request import FinishReason
from headrace.observe.adapters import AdapterRequests
from headrace.observe.metrics_page import MetricsPage


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
