"""The guide to the simulator: what it says to type runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "simulator.md").read_text()


def code(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


COMMANDS = [
    shlex.split(line)
    for block in code("bash")
    for line in block.replace("\\\n", " ").splitlines()
    if "headrace simulate" in line and "calibration" not in line
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[2])
def test_commands(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{i:02}.5,{200 + i},{9 + i}\n" for i in range(40))
    )
    Path("mooncake.jsonl").write_text(
        "".join(
            f'{{"timestamp": {900 * i}, "input_length": 900, "output_length": 9, "hash_ids": [{i % 3}, {i}]}}\n'
            for i in range(30)
        )
    )
    fewer = ["--requests", "60"] if {"--requests", "--workload"} & {*words} else []  # the last one counts
    result = CliRunner().invoke(app, [*words[1:], *fewer], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert re.search(r"requests \(failed\).*\(0\)", result.output)


def test_python(capsys):
    (example,) = code("python")
    exec(example.replace("500)", "60)"), {})
    assert float(capsys.readouterr().out) > 0
