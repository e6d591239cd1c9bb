"""Quantizing the built-in model from the command line, and refusing what would be too bad."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.compute import quantizing as quality
from headrace.config import ConfigError
from headrace.wiring import quantizing


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short windows: what is tested is the road, not the numbers."""
    monkeypatch.setattr(quantizing, "WINDOW", 48)
    monkeypatch.setattr(quantizing, "WINDOWS", 10)
    monkeypatch.setattr(quantizing, "LEAST_TOKENS", 40)


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["quantize", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_written_model_is_measured_and_can_be_loaded(tmp_path: Path) -> None:
    shown = run("builtin", "--scheme", "int8", "--method", "rtn", "--output", tmp_path / "few")
    assert "tokens of text that the model generated" in shown
    assert "int8 rtn" in shown
    assert f"written: {tmp_path / 'few'}" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["few"]
    assert len({path.stat().st_mode for path in (tmp_path / "few").iterdir()}) == 1
    again = quantizing.Quantizing("builtin").measure(tmp_path / "few", "again")
    assert again.quality.agreement > 0.9
    with pytest.raises(ConfigError, match=r"already quantized \(compressed-tensors\)"):
        run(tmp_path / "few", "--report")


def test_what_is_past_the_bounds_is_not_written_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a fox who lived by the river. " * 40)
    few = tmp_path / "few"
    asked = ("builtin-draft", "--method", "awq", "--calibrate", text, "--output", few)
    monkeypatch.setattr(quality, "MOST_DIVERGENCE", 0.0)
    with pytest.raises(ConfigError, match=r"divergence is 0.*, more than 0\.0: nothing is written"):
        run(*asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]
    assert "exceeds the quality limits" in run(*asked, "--force")
    assert (few / "config.json").is_file()


def test_a_report_has_every_way() -> None:
    shown = run("builtin-draft", "--report")
    ways = ["--quantization int8", "--quantization int4", "--kv-cache-dtype int8"]
    ways += [f"written {scheme} {method}" for scheme, method in quantizing.REPORTED]
    assert all(way in shown for way in ways)


def test_a_wrong_output_is_refused_before_the_text_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "Quantizing", None)
    with pytest.raises(ConfigError, match="exists already"):
        run("builtin", "--report", "--output", tmp_path)


def test_there_must_be_something_to_do_and_something_to_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --output FOLDER, or --report"):
        run("builtin")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="the file has too little text"):
        run("builtin", "--report", "--calibrate", tmp_path / "empty")


def test_what_is_half_written_goes_when_it_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "quantize", "--scheme", "int8", "--method", "rtn"]
    process = subprocess.Popen([*command, "--output", tmp_path / "few"], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120.0
        while not list(tmp_path.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_only_just_made_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path.mkdir

    def made_and_ended(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        made(path, mode, parents, exist_ok)
        if path.suffix == ".unproved":
            raise SystemExit(143)

    monkeypatch.setattr(Path, "mkdir", made_and_ended)
    result = CliRunner().invoke(app, ["quantize", "builtin", "--output", str(tmp_path / "few")])
    assert result.exit_code == 143
    assert list(tmp_path.iterdir()) == []
