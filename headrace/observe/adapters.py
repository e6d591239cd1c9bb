"""The LoRA adapters of open requests, in the metric by which gateways choose a server that has an adapter."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.events import Admitted, Arrived, Event, Finished, Preempted
from headrace.observe.metrics_page import MetricsPage


class AdapterRequests:
    """A `core.ports.Watcher`: ``lora_requests_info``, whose labels list adapters and whose value is a time, as in vLLM.

    ``max_loras`` is the number of places, ``name_of`` the name of an adapter by its digest, ``now`` the Unix time.
    """

    fold_tokens = None

    def __init__(
        self, page: MetricsPage, max_loras: int, name_of: Callable[[str], str], now: Callable[[], float]
    ) -> None:
        self._max_loras, self._name_of, self._now = str(max_loras), name_of, now
        self._waiting: dict[str, str] = {}
        self._running: dict[str, str] = {}
        self._info = page.gauge(
            "lora_requests_info",
            "LoRA adapters of running and of waiting requests, in the labels; the value is the Unix time.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        page.before_render(self._measure)

    def fold(self, event: Event, now: float) -> None:
        match event:
            case Arrived() if event.adapter:
                self._waiting[event.request_id] = event.adapter
            case Admitted() if event.request_id in self._waiting:
                self._running[event.request_id] = self._waiting.pop(event.request_id)
            case Preempted() if event.request_id in self._running:
                self._waiting[event.request_id] = self._running.pop(event.request_id)
            case Finished():
                self._waiting.pop(event.request_id, None)
                self._running.pop(event.request_id, None)

    def _measure(self) -> None:
        self._info.series.clear()
        waiting, running = (
            ",".join(sorted({self._name_of(each) for each in of.values()}))
            for of in (self._waiting, self._running)
        )
        self._info.of(self._max_loras, waiting, running).value = self._now()
