"""``headrace cache calibrate``, with an encoder whose vectors are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.compute.encoder.sentences import Sentences
from headrace.config import ConfigError
from headrace.response_cache.rules.calibration import Calibration
from tests.response_cache.semantic.synthetic import Likeness


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return drawn_pairs(3000, tmp_path, monkeypatch)


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return drawn_pairs(400, tmp_path, monkeypatch)


def drawn_pairs(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    drawn = Likeness(rows, seed=1)

    class Drawn:
        name = "drawn@1"
        embed = staticmethod(drawn.embed)

    monkeypatch.setattr(Sentences, "from_name", lambda name: Drawn())
    file = tmp_path / "pairs.csv"
    lines = [f"{row.first},{row.second},{int(row.same)}" for row in drawn.pairs.rows]
    file.write_text("text_a,text_b,same\n" + "\n".join(lines) + "\n")
    return file


def calibrate(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["cache", "calibrate", *map(str, arguments)], catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.mark.slow
def test_it_writes_what_it_can_prove(pairs: Path, tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    said = calibrate(pairs, "--output", output, "--max-error", 0.04)
    assert "error bound 0.04 of the served responses" in said
    assert "certified" in said
    assert "not certified: the labelled rows cannot prove that at most 0.01" in said
    calibration = Calibration.from_text(output.read_text())
    assert calibration.encoder == "drawn@1"
    assert calibration.strata[0].certificate(0.04, 0.95).bound <= 0.04


def test_it_writes_nothing_that_it_cannot_prove(few: Path, tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    with pytest.raises(ConfigError, match="no calibration was written: the labelled rows cannot prove"):
        calibrate(few, "--output", output, "--max-error", 0.0005)
    assert not output.exists()


def test_a_threshold_by_hand_is_counted_although_nothing_is_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = drawn_pairs(1000, tmp_path, monkeypatch)
    output = tmp_path / "calibration.json"
    said = calibrate(pairs, "--output", output, "--max-error", 0.0005, "--threshold", 0.9)
    assert "not certified: the labelled rows cannot prove" in said
    assert "from a cosine of 0.9 on, 95% confidence:" in said
    [claim] = Calibration.from_text(output.read_text()).claims(0.9, 0.95)
    assert claim.tally.served > 100
    assert 0 < claim.tally.wrong / claim.tally.served < claim.bound < 0.05
    with pytest.raises(ConfigError, match="--threshold: expected a cosine"):
        calibrate(pairs, "--threshold", 1.5)


@pytest.mark.parametrize("flags", [("--output", "x.json"), ("--plot", "x.png"), ("--plot", "x.words")])
def test_what_cannot_be_written_is_one_line(few: Path, flags: tuple[str, str]) -> None:
    flag, name = flags  # in a folder that is a file, or of a kind that no picture has
    path = few.with_name(name) if name == "x.words" else few / name
    with pytest.raises(ConfigError, match=f"{flag} .*{name}"):
        calibrate(few, "--output", few.with_name("c.json"), "--max-error", 0.2, flag, path)


def test_settings_that_cannot_be(few: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-error: expected a number"):
        calibrate(few, "--max-error", 1.5)
    with pytest.raises(ConfigError, match="cannot be read"):
        calibrate(tmp_path / "gone.csv")
