"""NVML over a double of its library; on a machine without a GPU the real one is absent."""

from __future__ import annotations

from headrace.observe.resources.nvml import open_nvml
from tests.observe.resources.gpu import Library


def test_a_gpu() -> None:
    library = Library()
    device = open_nvml("GPU-1", library)
    assert device is not None
    assert device.memory() == (3 << 30, 80 << 30)
    assert device.utilization() == 0.75
    assert device.measures_energy
    library.millijoules = 4500
    assert device.joules() == 3.5


def test_a_gpu_without_a_counter_of_energy() -> None:
    device = open_nvml("GPU-1", Library(millijoules=None))
    assert device is not None
    assert not device.measures_energy
    assert device.joules() == 0.0


def test_no_gpu_no_device() -> None:
    assert open_nvml("GPU-2", Library()) is None
    library = Library()
    library.broken = True
    assert open_nvml("GPU-1", library) is None
