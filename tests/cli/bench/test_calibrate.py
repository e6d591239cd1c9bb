"""Calibrating the built-in model, and simulating the machine that was measured."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError
from tests.lab.calibration.test_values import CALIBRATION
from tests.server.conftest import serving


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_machine_is_measured_and_then_simulated(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.lab.calibration.TURNS", 2)
    path = tmp_path / "calibration.json"
    limits = ("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20))
    with serving("--max-num-seqs", "4") as server:
        shown = run(
            *("bench", "calibrate", "builtin", *limits, "--max-model-len", "512", "--base-url", server.url),
            *("--output", path),
        )
    assert "builtin on" in shown
    reported = json.loads(path.read_text())
    assert reported["steps"] > 30
    assert reported["step"] + reported["row"] + reported["sample"] + sum(reported["tokens"]) > 0
    assert reported["front_request"] >= 0  # against the noise of a busy machine it may come to nothing
    shown = run(
        "simulate", "--calibration", path, "--workload", "prompt=40,answer=9,rate=20", "--requests", "40"
    )
    assert "40 (0)" in shown


def test_what_cannot_be_written_is_shown_first(tmp_path, monkeypatch, capsys):
    """It took minutes to measure."""
    monkeypatch.setattr("headrace.cli.bench.calibrate.measure", lambda *_: CALIBRATION)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*file"):
        app(["bench", "calibrate", "--output", str(tmp_path / "file" / "x.json")], standalone_mode=False)
    assert CALIBRATION.model in capsys.readouterr().out
