from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.peers.shapes import SHAPES
from headrace.cli import app
from headrace.cli.bench.roofline import _step
from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.measure import TimedKernels
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.families import parse_config
from headrace.compute.model.spec import LayerSpec
from headrace.config import ConfigError
from headrace.lab.bench.latency import Machine, StepTimes
from headrace.lab.bench.stats import spread

SMALL = ("builtin", "--input-len", "90", "--output-len", "2", "--max-model-len", "1024")
SMALL += ("--kv-cache-memory-bytes", str(16 << 20))


@pytest.mark.usefixtures("quick_rates")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_of_a_step_are_shown_with_the_machines_limits(dtype: str, tmp_path: Path) -> None:
    try:
        CppKernels()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    output = tmp_path / "roofline.json"
    words = [
        "bench",
        "roofline",
        *SMALL,
        "--batch-size",
        "1",
        "--batch-size",
        "20",
        "--dtype",
        dtype,
        "--rounds",
        "2",
    ]
    result = CliRunner().invoke(app, [*words, "--output", str(output)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for expected in (
        "memory read by 1 thread",
        "decode: batch 20, context 90",
        "prefill: batch 1",
        "LM head",
        f"{dtype} products, own",
        "2 rounds reached",
    ):
        assert expected in result.output
    steps = json.loads(output.read_text())["roofline"]["steps"]
    assert [(step["kind"], step["batch"]) for step in steps if step["kind"] == "decode"] == [
        ("decode", 1),
        ("decode", 20),
    ]
    for step in steps:
        parts = {part["name"]: part for part in step["parts"]}
        assert parts["linear layers"]["bandwidth_seconds"] > 0
        assert parts["linear layers"]["arithmetic_seconds"] > 0
        assert parts["attention"]["arithmetic_seconds"] > 0
        assert sum(part["seconds"] for part in parts.values()) > 0
        assert step["seconds"] > 0
        assert step["allowed_seconds"] > 0
        assert step["allowed_seconds"] / step["seconds"] == pytest.approx(min(step["shares"]), rel=1e-3)
        assert len(step["shares"]) == 2


@pytest.mark.parametrize(("kind", "count"), [("decode", 4), ("prefill", 2)])
def test_attention_of_a_layer_with_a_window_needs_no_more_than_that(kind: str, count: int) -> None:
    spec = replace(
        parse_config(SHAPES["qwen3-0.6b"].config()), num_layers=2, layers=(LayerSpec(), LayerSpec(window=10))
    )
    spent = dict.fromkeys(("attention", "elementwise", "forward", "sample"), 0.0)
    spent |= {f"{part}{of}": 0.0 for part in ("linear", "head") for of in ("", " bytes", " products")}
    times = StepTimes(kind, spread([1.0] * count), {}, spent)
    kernels = TimedKernels(TorchKernels())
    kernels.numbers |= {"linear": {}, "head": {}}
    machine = Machine({1: 1.0}, {"float32": {"own": 1.0}})
    step = _step(times, 3, 100, 16, spec.shape, "float32", kernels, 8.0, machine)
    (attention,) = (part for part in step.parts if part.name == "attention")
    # A query multiplies each key and value with all heads; a layer's share of a token's 8 bytes are 4.
    each = 4 * spec.num_heads * spec.head_dim
    if kind == "decode":
        assert attention.arithmetic == 3 * each * (108 + 10)
        assert attention.bandwidth == 3 * 4 * (108 + 10)
    else:
        assert attention.arithmetic == 3 * each * (sum(range(1, 101)) + sum(range(1, 11)) + 90 * 10) / count
        assert attention.bandwidth == 0.0


def test_other_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="measures the cpp kernels only; this machine uses 'torch'"):
        CliRunner().invoke(app, ["bench", "roofline", *SMALL, "--kernels", "torch"], catch_exceptions=False)


def test_a_dry_run_prints_the_steps_that_a_gpu_is_expected_to_take() -> None:
    words = ["bench", "roofline", "qwen3-0.6b", "--batch-size", "64", "--input-len", "1024"]
    result = CliRunner().invoke(app, [*words, "--dry-run", "h200"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "qwen3-0.6b on H200" in result.output
    shown = steps_of(result.output)
    assert list(shown) == ["torch", "triton", "triton, graphs"]
    assert shown["torch"] > shown["triton"] > 0
    with pytest.raises(ConfigError, match="--dry-run: there is no device 'h2000'"):
        CliRunner().invoke(app, [*words, "--dry-run", "h2000"], catch_exceptions=False)
    few = ["--quantization", "fp8", "--kv-cache-dtype", "fp8"]
    result = CliRunner().invoke(app, [*words, "--dry-run", "h200", *few], catch_exceptions=False)
    few_bits = steps_of(result.output)
    assert list(few_bits) == ["triton", "triton, graphs"]
    assert 0 < few_bits["triton"] < shown["triton"] / 1.8


def steps_of(output: str) -> dict[str, float]:
    """Gigabytes that a step reads, by kernels."""
    lines = [line.split("│") for line in output.splitlines() if "1,024" in line]
    return {cells[1].strip(): float(cells[6]) for cells in lines}
