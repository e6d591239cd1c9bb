from __future__ import annotations

import pytest

from headrace.lab.plan.roofline import BY_DRIVER_NAME, DEVICES, H100, UnknownDevice, device


def test_a_device_is_found_in_any_case():
    assert device("h100-sxm") is H100
    with pytest.raises(UnknownDevice, match=r"no device 'T4'.*H100-SXM"):
        device("T4")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100 80GB PCIe",
            "NVIDIA A10",
            "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL",
        ),
        *("NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H800", ""),
    ],
)
def test_a_gpu_of_a_similar_name_has_no_data_sheet_here(name):
    assert BY_DRIVER_NAME["NVIDIA H100 80GB HBM3"] is H100
    assert name not in BY_DRIVER_NAME


@pytest.mark.parametrize("spec", DEVICES.values(), ids=DEVICES.keys())
def test_figures_are_of_the_right_order(spec):
    assert 0 < spec.efficiency_compute <= 0.8  # what matrices alone reach
    assert 0 < spec.efficiency_bandwidth <= 0.9  # what copies alone reach
    assert 1.9 < spec.int8_ops / spec.bf16_flops < 2.7
    assert spec.reached_bandwidth > spec.host_bandwidth
    assert 0 < spec.step_overhead_seconds < 0.01


def test_one_stream_of_an_8b_model_is_as_slow_as_published():
    read_bytes = 2 * (8.03e9 - 128_256 * 4096)  # all weights but the input table
    step = read_bytes / H100.reached_bandwidth + H100.step_overhead_seconds
    assert step == pytest.approx(6.44e-3, rel=0.02)
