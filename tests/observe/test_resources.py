"""A double of the module ``pynvml`` with one GPU."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.observe.metrics import Traffic
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.resources import (
    KINDS,
    NOT_MEASURABLE,
    RaplEnergy,
    ResourceMeter,
    ThreadTimes,
    open_nvml,
)

# ruff: noqa: N802 (names are those of the library)


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


def package(folder: Path, name: str, microjoules: int, limit: int = 10_000_000) -> Path:
    domain = folder / name
    domain.mkdir(exist_ok=True)
    (domain / "energy_uj").write_text(f"{microjoules}\n")
    (domain / "max_energy_range_uj").write_text(f"{limit}\n")
    return domain


def test_packages_are_added_up_and_parts_of_them_are_not(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 1_000_000)
    package(tmp_path, "intel-rapl:1", 2_000_000)
    package(tmp_path, "intel-rapl:0:0", 500_000)
    rapl = RaplEnergy(tmp_path)
    assert rapl.measurable
    assert rapl.joules() == 0.0
    package(tmp_path, "intel-rapl:0", 1_500_000)
    package(tmp_path, "intel-rapl:1", 4_000_000)
    package(tmp_path, "intel-rapl:0:0", 900_000)
    assert rapl.joules() == 2.5


def test_a_counter_that_wraps(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 9_000_000)
    rapl = RaplEnergy(tmp_path)
    package(tmp_path, "intel-rapl:0", 1_000_000)
    assert rapl.joules() == 2.0


def test_what_cannot_be_read_is_not_measurable(tmp_path: Path) -> None:
    assert not RaplEnergy(tmp_path / "missing").measurable
    (package(tmp_path, "intel-rapl:0", 1) / "energy_uj").unlink()
    assert not RaplEnergy(tmp_path).measurable


def test_a_counter_that_disappears_keeps_its_value(tmp_path: Path) -> None:
    domain = package(tmp_path, "intel-rapl:0", 1_000_000)
    rapl = RaplEnergy(tmp_path)
    package(tmp_path, "intel-rapl:0", 3_000_000)
    assert rapl.joules() == 2.0
    (domain / "energy_uj").unlink()
    assert rapl.joules() == 2.0


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


TICK = os.sysconf("SC_CLK_TCK")


def write(tasks: Path, thread: int, seconds: float) -> None:
    folder = tasks / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["0"] * 50
    fields[11], fields[12] = str(int(seconds * TICK / 2)), str(int(seconds * TICK / 2))
    (folder / "stat").write_text(f"{thread} (a (strange) name) {' '.join(fields)}")


def test_threads_are_counted_by_kind(tmp_path: Path) -> None:
    write(tmp_path, os.getpid(), 2.0)
    write(tmp_path, 999_999_998, 4.0)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="headrace-engine")
    thread.start()
    try:
        assert thread.native_id is not None
        write(tmp_path, thread.native_id, 6.0)
        seconds = ThreadTimes(tmp_path).seconds()
    finally:
        stop.set()
        thread.join()
    assert seconds == {"engine": 6.0, "event_loop": 2.0, "workers": 0.0, "native": 4.0}


def test_a_thread_that_has_ended_still_counts(tmp_path: Path) -> None:
    times = ThreadTimes(tmp_path)
    write(tmp_path, 999_999_998, 4.0)
    assert times.seconds()["native"] == 4.0
    (tmp_path / "999999998" / "stat").unlink()
    assert times.seconds()["native"] == 4.0
    write(tmp_path, 999_999_998, 2.0)  # the number is used again
    assert times.seconds()["native"] == 6.0
    write(tmp_path, 999_999_998, 8.0)
    assert times.seconds()["native"] == 12.0


def test_this_process() -> None:
    times = ThreadTimes()
    if times.measurable:
        assert set(times.seconds()) == set(KINDS)
    assert not ThreadTimes(Path("/does/not/exist")).measurable


def test_nothing_can_be_measured(tmp_path: Path) -> None:
    page = MetricsPage()
    missing = tmp_path / "missing"
    meter = ResourceMeter(page, lambda: 5, ThreadTimes(missing), RaplEnergy(missing))
    assert page.render() == b""
    assert meter.energy() == NOT_MEASURABLE


def test_all_can_be_measured(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 1_000_000)
    rapl, library, page = RaplEnergy(tmp_path), Library(), MetricsPage()
    meter = ResourceMeter(page, lambda: 4, ThreadTimes(), rapl, open_nvml("GPU-1", library))
    package(tmp_path, "intel-rapl:0", 3_000_000)
    library.millijoules = 7000
    text = page.render().decode()
    for line in (
        'headrace:energy_joules_total{source="rapl"} 2.0',
        'headrace:energy_joules_total{source="nvml"} 6.0',
        "headrace:energy_joules_per_token 2.0",
        "headrace:device_memory_used_bytes 3.221225472e+09",
        "headrace:device_utilization_ratio 0.75",
    ):
        assert line in text
    assert meter.energy() == {"joules": {"rapl": 2.0, "nvml": 6.0}, "joules_per_token": 2.0}


def test_traffic() -> None:
    page = MetricsPage()
    traffic = Traffic(page, lambda: {"tokenize": 1.5, "detokenize": 0.5})
    traffic.count(10, 200)
    traffic.count(1, 2)
    text = page.render().decode()
    assert "headrace:http_received_bytes_total 11.0" in text
    assert "headrace:http_sent_bytes_total 202.0" in text
    assert 'headrace:text_seconds_total{part="tokenize"} 1.5' in text


@pytest.mark.parametrize("tokens", [0])
def test_no_tokens_no_energy_per_token(tmp_path: Path, tokens: int) -> None:
    package(tmp_path, "intel-rapl:0", 1)
    meter = ResourceMeter(MetricsPage(), lambda: tokens, ThreadTimes(), RaplEnergy(tmp_path))
    assert meter.energy() == {"joules": {"rapl": 0.0}, "joules_per_token": None}
