"""Metrics of threads, device and energy, measured when the page is rendered. Missing sources have no metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.observe.metrics_page import MetricsPage
from headrace.observe.resources.energy import RaplEnergy
from headrace.observe.resources.nvml import NvmlDevice
from headrace.observe.resources.threads import ThreadTimes

NOT_MEASURABLE = "not measurable"


class _Energy(Protocol):
    def joules(self) -> float: ...


class ResourceMeter:
    """Writes to ``page``. ``tokens`` returns the number of tokens computed so far, for joules per token."""

    def __init__(
        self,
        page: MetricsPage,
        tokens: Callable[[], float],
        threads: ThreadTimes,
        rapl: RaplEnergy,
        device: NvmlDevice | None = None,
    ) -> None:
        self._page = page
        self._tokens = tokens
        self._energies: dict[str, _Energy] = {}
        if rapl.measurable:
            self._energies["rapl"] = rapl
        if device is not None and device.measures_energy:
            self._energies["nvml"] = device
        if threads.measurable:
            self._measure_threads(threads)
        if device is not None:
            self._measure_device(device)
        if self._energies:
            self._measure_energy()

    def energy(self) -> Mapping[str, Any] | str:
        """Joules by source since the server started, and joules per computed token; a message without a source."""
        if not self._energies:
            return NOT_MEASURABLE
        joules = {name: source.joules() for name, source in self._energies.items()}
        tokens = self._tokens()
        return {"joules": joules, "joules_per_token": sum(joules.values()) / tokens if tokens else None}

    def _measure_threads(self, threads: ThreadTimes) -> None:
        family = self._page.counter(
            "thread_cpu_seconds",
            "CPU time by kind of thread: engine, event_loop (HTTP and text), workers (other threads of Python) and "
            "native (threads of libraries, such as those of kernels).",
            ["thread"],
        )

        def measure() -> None:
            for kind, seconds in threads.seconds().items():
                cell = family.of(kind)
                cell.value = max(cell.value, seconds)

        self._page.before_render(measure)

    def _measure_device(self, device: NvmlDevice) -> None:
        used = self._page.gauge(
            "device_memory_used_bytes", "GPU memory in use, by all processes (extra nvidia)."
        ).of()
        total = self._page.gauge("device_memory_total_bytes", "GPU memory (extra nvidia).").of()
        busy = self._page.gauge(
            "device_utilization_ratio",
            "Share of the last sample period in which the GPU ran a kernel (extra nvidia).",
        ).of()

        def measure() -> None:
            used.value, total.value = device.memory()
            busy.value = device.utilization()

        self._page.before_render(measure)

    def _measure_energy(self) -> None:
        family = self._page.counter(
            "energy_joules",
            "Energy since the server started, by source (rapl: processor packages).",
            ["source"],
        )
        each = self._page.gauge(
            "energy_joules_per_token",
            "Energy per computed token, prompt and output, since the server started.",
        ).of()

        def measure() -> None:
            for name, source in self._energies.items():
                family.of(name).value = source.joules()
            joules, tokens = sum(cell.value for cell in family.series.values()), self._tokens()
            each.value = joules / tokens if tokens else 0.0

        self._page.before_render(measure)
