"""Memory, utilization and energy of an NVIDIA GPU through NVML; needs the extra ``nvidia``."""

from __future__ import annotations

from importlib import import_module
from typing import Any


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
