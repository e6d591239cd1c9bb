"""``headrace cache estimate`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.compute.checkpoint import ModelError
from headrace.compute.encoder.sentences import Sentences
from headrace.config import ConfigError


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four requests, of which two are equal, one is sampled, and one is broken; no encoder."""

    def missing(name: str) -> Sentences:
        raise ModelError("there is no encoder")

    monkeypatch.setattr(Sentences, "from_name", missing)
    asked = {"messages": [{"role": "user", "content": "What does the bakery sell today?"}], "max_tokens": 10}
    bodies = [asked | {"temperature": 0}, asked | {"temperature": 0}, asked | {"temperature": 1}]
    lines = [
        json.dumps({"body": body, "timestamp": 10 * number, "output_tokens": 10})
        for number, body in enumerate(bodies)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join([*lines, "{broken"]) + "\n")
    return path


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["cache", "estimate", *map(str, arguments)], catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_a_table_and_a_file(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    prices = ("--price-per-million-prompt-tokens", 1, "--price-per-million-output-tokens", 2)
    said = run(log, "--model", "builtin-draft", "--output", output, *prices)
    assert "requests     3 of 1 tenants" in said
    assert "not cached   1 (sampled without a seed)" in said
    assert "line 4: not valid JSON" in said
    assert "near duplicates are not estimated: there is no encoder" in said
    assert "coalesced ones count as exact; name a machine" in said
    found = json.loads(output.read_text())
    exact = found["saved"]["exact"]
    assert (exact["requests"], exact["output_tokens"]) == (1, 10)
    assert exact["cost"] == pytest.approx((exact["prompt_tokens"] + 20) / 1e6)
    assert "semantic" not in found["saved"]
    assert found["problems"][0]["line"] == 4
    together = found["saved"]["together"]
    parts = [found["saved"][name] for name in ("exact", "prefix, of the rest")]
    for name in ("requests", "prompt_tokens", "cost"):
        assert together[name] == pytest.approx(sum(part[name] for part in parts))


def test_device_seconds_and_their_price(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    machine = ("--simulated-device", "L4", "--device-price", "3600/h", "--concurrency", 4)
    said = run(log, "--model", "builtin-draft", "--output", output, *machine)
    assert "device s" in said
    found = json.loads(output.read_text())
    exact = found["saved"]["exact"]
    assert 0 < exact["device_seconds"] < found["device_seconds"]
    assert exact["cost"] == pytest.approx(exact["device_seconds"])
    assert found["saved"]["coalesced"]["requests"] == 0  # ten seconds apart


def test_times_let_responses_expire(log: Path, tmp_path: Path) -> None:
    said = run(log, "--model", "builtin-draft", "--response-cache-ttl", "5s")
    exact = next(line for line in said.splitlines() if line.strip().startswith("exact"))
    assert exact.split()[1] == "0"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--device-price", "2/h"), "--device-price needs a machine"),
        (("--simulated-device", "abacus"), "--simulated-device: there is no device"),
        (("--semantic-encoder", "x"), "--semantic-encoder: there is no encoder"),
        (("--max-model-len", "-1"), "--max-model-len"),
    ],
)
def test_settings_that_cannot_be(log: Path, flags: tuple[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run(log, "--model", "builtin-draft", *flags)


def test_files_that_cannot_be(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read: no such file"):
        run(tmp_path / "gone.jsonl", "--model", "builtin-draft")
    with pytest.raises(ConfigError, match="would be overwritten"):
        run(log, "--model", "builtin-draft", "--output", log)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no request could be used"):
        run(tmp_path / "empty.jsonl", "--model", "builtin-draft")
