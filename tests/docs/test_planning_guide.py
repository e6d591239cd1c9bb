"""The guide to the planner: what it says to type runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "planning.md").read_text()
COMMANDS = [
    shlex.split(line.partition("#")[0])
    for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


def test_there_is_something_to_type():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[2:5]))
def test_commands(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-model").mkdir()
    Path("my-model/config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512}'
    )
    Path("conversations.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{i:02}.5,{200 + i},{9 + i}\n" for i in range(40))
    )
    fewer = ["--requests", "30"] if {"--requests", "--workload"} & {*words} else []  # the last one counts
    result = CliRunner().invoke(app, [*words[1:], *fewer], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    if words[1] == "plan":
        assert "KV cache tokens" in result.output
        assert ("targets" in result.output) == ("--workload" in words or "--trace" in words)
    else:
        assert "TTFT" in result.output
