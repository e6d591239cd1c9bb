"""A double of the module ``pynvml`` with one GPU."""

# ruff: noqa: N802 (names are those of the library)

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class Library:
    NVMLError = NVMLError

    def __init__(self, uuid: str = "GPU-1", millijoules: int | None = 1000) -> None:
        self.uuid, self.millijoules, self.broken = uuid, millijoules, False

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=75, memory=10)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.millijoules is None:
            raise NVMLError("not supported")
        return self.millijoules
