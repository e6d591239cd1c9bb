from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.compute.kernels import KernelsUnavailable, probe
from headrace.compute.kernels.cpp import CppKernels
from headrace.config import ConfigError

SMALL = ("builtin", "--input-len", "90", "--output-len", "2", "--kv-cache-memory-bytes", str(16 << 20))


def test_the_parts_of_a_step_are_told_beside_what_the_machine_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        CppKernels()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    monkeypatch.setattr(probe, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "_ROWS", 8)
    output = tmp_path / "roofline.json"
    words = ["bench", "roofline", *SMALL, "--batch-size", "1", "--batch-size", "20", "--output", str(output)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for expected in (
        "memory read by 1 thread",
        "decode: batch 20, context 90",
        "prefill: batch 1",
        "LM head",
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


def test_other_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="measures the kernels 'cpp', and here are 'torch'"):
        CliRunner().invoke(app, ["bench", "roofline", *SMALL, "--kernels", "torch"], catch_exceptions=False)
