from __future__ import annotations

import json

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


OWN = {
    "name": "mine",
    "bf16_flops": 1e14,
    "int8_ops": 2e14,
    "memory_bytes": 16 << 30,
    "bandwidth": 5e11,
    "host_bandwidth": 1e10,
    "efficiency_compute": 0.5,
    "efficiency_bandwidth": 0.8,
    "step_overhead_seconds": 0.001,
    "dollars_per_hour": 0,
}


def write(folder, content):
    file = folder / "mine.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_a_device_of_ones_own_is_read_from_a_file(tmp_path):
    spec = device(write(tmp_path, OWN))
    assert (spec.name, spec.bandwidth, spec.max_num_seqs) == ("mine", 5e11, 64)
    assert device(write(tmp_path, OWN | {"max_num_seqs": 8})).max_num_seqs == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "expected one object"),
        (OWN | {"colour": 1}, "unknown field colour"),
        ({k: v for k, v in OWN.items() if k != "bandwidth"}, "the field bandwidth is missing"),
        (OWN | {"bandwidth": "fast"}, "bandwidth must be a number, not 'fast'"),
        (OWN | {"bandwidth": True}, "bandwidth must be a number"),
        (OWN | {"bandwidth": 0}, "bandwidth must be above 0"),
        (OWN | {"memory_bytes": 1.5}, "memory_bytes must be a whole number"),
        (OWN | {"efficiency_compute": 1.2}, "efficiency_compute is a share of the peak, at most 1"),
        (OWN | {"name": " "}, "name must be a text"),
        ('{"bandwidth": NaN}', "missing"),
    ],
)
def test_a_file_that_describes_no_device_is_refused_with_its_field(tmp_path, content, message):
    with pytest.raises(UnknownDevice, match=message):
        device(write(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UnknownDevice, match="cannot be read"):
        device(str(tmp_path / "none.json"))
