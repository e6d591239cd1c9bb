"""The check of a GPU, without one: what it measures, and that a stage that fails does not end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts import gpu_figures

ROOT = Path(__file__).resolve().parents[2]


def test_a_target_belongs_to_a_figure_that_is_taken(tmp_path: Path) -> None:
    stages = gpu_figures.measurements("cuda", tmp_path, None, (tmp_path / "figures.json", 1.0))
    for label, speeds in gpu_figures.TARGETS.items():
        assert f"steps, {label}" in stages
        assert set(speeds) <= set(gpu_figures.ON_GPU.batches)
    assert 1024 in gpu_figures.ON_GPU.contexts


def test_the_time_of_a_graph_is_the_median_of_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 10.0, 14.0, 20.0, 23.0])  # of the begin and end of each replay, in milliseconds

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = next(times)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    done: list[str] = []
    graphs = SimpleNamespace(_replays={"a": lambda: done.append("a"), "b": lambda: done.append("b")})
    before = graphs._replays

    def generate(*_: Any) -> float:
        for variant in "aba":
            graphs._replays[variant]()
        return 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_figures, "_seconds", generate)
    llm: Any = SimpleNamespace(loaded=SimpleNamespace(runner=SimpleNamespace(_graphs=graphs)))
    assert gpu_figures._graph_seconds(llm, [], 3) == pytest.approx(0.003)
    assert done == ["a", "b", "a"]
    assert graphs._replays is before


def test_a_failing_stage_is_reported_and_others_are_not_repeated(tmp_path: Path) -> None:
    vllm = tmp_path / "python"
    vllm.write_text("#!/bin/sh\necho no such module\nexit 9\n")
    vllm.chmod(0o755)
    stages = gpu_figures.measurements("cpu", tmp_path, vllm, (tmp_path / "figures.json", 1.0))
    checks = ("auto", "attention", "operations", "sampling", "experts", "adapters", "mixers", "graphs")
    checks += tuple(f"{check}, {kernels}" for kernels in ("torch", "triton") for check in ("greedy", "seeds"))
    state = tmp_path / "state.json"
    state.write_text(json.dumps({name: "passed" for name in (*checks, *stages) if "vLLM" not in name}))
    given = ["--device", "cpu", "--state", str(state), "--vllm", str(vllm)]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu_check", *given],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("==")] == [
        "== clients of vLLM, builtin"
    ]
    assert "no such module" in done.stdout
    assert json.loads(state.read_text())["clients of vLLM, builtin"].startswith("failed (1)")
