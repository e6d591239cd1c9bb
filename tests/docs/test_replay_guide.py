"""The guide to recordings: what it says to type runs."""

from __future__ import annotations

import gzip
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from tests.wiring.test_recording import recorded

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "replay.md").read_text()
COMMANDS = [
    shlex.split(line.partition("#")[0])
    for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("headrace replay")
]


def test_there_is_something_to_type():
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[2:]))
def test_commands(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded(Path("trace.jsonl"))
    Path("trace.jsonl.gz").write_bytes(gzip.compress(Path("trace.jsonl").read_bytes()))
    known = [re.sub(r"^cmpl-.*", "r2", word) for word in words[1:]]
    result = CliRunner().invoke(app, known, catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "8 requests" in result.output
    assert ("simulated, unchanged" in result.output) == ("--policy" in words or "--set" in words)
