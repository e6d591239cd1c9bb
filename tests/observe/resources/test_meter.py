"""Metrics of threads, device and energy: what is absent has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.observe.metrics_page import MetricsPage
from headrace.observe.resources.energy import RaplEnergy
from headrace.observe.resources.meter import NOT_MEASURABLE, ResourceMeter
from headrace.observe.resources.nvml import open_nvml
from headrace.observe.resources.threads import ThreadTimes
from headrace.observe.resources.traffic import Traffic
from tests.observe.resources.gpu import Library
from tests.observe.resources.test_energy import package


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
