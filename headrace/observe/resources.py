"""Threads, GPU and energy as metrics.

Energy is that of the processor packages, from the RAPL counters of Linux (``/sys/class/powercap``). The counters are
often readable by root only, and missing in virtual machines. Then energy is not measured.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from headrace.observe.metrics_page import MetricsPage

POWERCAP = Path("/sys/class/powercap")
_PACKAGES = "intel-rapl:?"  # also the name of AMD's driver; subdomains of packages have a second number


class RaplEnergy:
    """Joules of all packages since construction; handles counters that wrap, if it is read often enough."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._domains = {}
        self._joules = 0.0
        for domain in sorted(folder.glob(_PACKAGES)):
            try:
                limit = int((domain / "max_energy_range_uj").read_text())
                self._domains[domain] = (int((domain / "energy_uj").read_text()), limit)
            except (OSError, ValueError):
                continue

    @property
    def measurable(self) -> bool:
        """Whether a package has a counter that this process may read."""
        return bool(self._domains)

    def joules(self) -> float:
        """Joules since this object was made."""
        for domain, (last, limit) in self._domains.items():
            try:
                value = int((domain / "energy_uj").read_text())
            except (OSError, ValueError):
                continue
            self._joules += (value - last + (limit if value < last else 0)) / 1e6
            self._domains[domain] = (value, limit)
        return self._joules


# Memory, utilization and energy of an NVIDIA GPU through NVML; needs the extra ``nvidia``.


class NvmlDevice:
    """One GPU. ``library`` is the module ``pynvml`` after its initialization."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle
        self._first_millijoules = self._millijoules()

    def memory(self) -> tuple[int, int]:
        """Bytes in use, by all processes, and of the whole device."""
        facts = self._library.nvmlDeviceGetMemoryInfo(self._handle)
        return int(facts.used), int(facts.total)

    def utilization(self) -> float:
        """Share of NVML's last sample period in which a kernel ran, 0 to 1."""
        return float(self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100

    @property
    def measures_energy(self) -> bool:
        """Whether the device counts its energy."""
        return self._first_millijoules is not None

    def joules(self) -> float:
        """Joules since this object was made."""
        now = self._millijoules()
        return (
            0.0 if now is None or self._first_millijoules is None else (now - self._first_millijoules) / 1e3
        )

    def _millijoules(self) -> int | None:
        try:
            return int(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._library.NVMLError:
            return None


def open_nvml(uuid: str, library: Any = None) -> NvmlDevice | None:
    """The GPU with this UUID; None without NVML, its Python package, or such a device."""
    if library is None:
        try:
            library = import_module("pynvml")
        except ImportError:
            return None
    try:
        library.nvmlInit()
        return NvmlDevice(library, library.nvmlDeviceGetHandleByUUID(uuid))
    except library.NVMLError:
        return None


# CPU time of this process by kind of thread, from ``/proc``; Linux only.

TASKS = Path("/proc/self/task")
ENGINE = "headrace-engine"
KINDS = ("engine", "event_loop", "workers", "native")

_USER, _SYSTEM = 11, 12  # fields after the name, which may contain spaces


class ThreadTimes:
    """CPU seconds by kind of thread. Ended threads count with their last reading.

    ``engine`` returns the CPU time of an engine in another process, which counts as the engine's.
    """

    def __init__(self, tasks: Path = TASKS, engine: Callable[[], float] = float) -> None:
        self._tasks = tasks
        self._engine = engine
        self._seen: dict[int, tuple[str, float]] = {}
        self._ended = dict.fromkeys(KINDS, 0.0)
        self._tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

    @property
    def measurable(self) -> bool:
        """Whether this system reports thread times."""
        return self._tasks.is_dir()

    def seconds(self) -> Mapping[str, float]:
        """CPU seconds by kind of thread, since the process began."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        seen: dict[int, tuple[str, float]] = {}
        for task in self._tasks.iterdir():
            thread = int(task.name)
            if (used := self._used(task)) is not None:
                seen[thread] = (_kind(thread, names.get(thread)), used)
        for thread, (kind, used) in self._seen.items():
            if thread not in seen or seen[thread][1] < used:  # thread ids may be reused
                self._ended[kind] += used
        self._seen = seen
        totals = dict(self._ended)
        for kind, used in seen.values():
            totals[kind] += used
        totals["engine"] += self._engine()
        return totals

    def _used(self, task: Path) -> float | None:
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            return None
        return (int(fields[_USER]) + int(fields[_SYSTEM])) / self._tick


def _kind(thread: int, name: str | None) -> str:
    if name is None:
        return "native"
    if name == ENGINE:
        return "engine"
    return "event_loop" if thread == os.getpid() else "workers"


# Metrics of threads, device and energy, measured when the page is rendered. Missing sources have no metrics.

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
            "CPU time by kind of thread: engine (with --engine-process, its whole process), event_loop (HTTP and "
            "text), workers (other threads of Python) and native (threads of libraries, such as those of kernels).",
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
