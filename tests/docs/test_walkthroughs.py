"""The tutorial's and the sizing example's figures are those that their commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli import app

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text()
SIZING = (DOCS / "operate" / "sizing.md").read_text()


def commands(text: str, name: str) -> list[list[str]]:
    """The arguments of every ``headrace NAME`` in a page's Bash blocks."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in blocks.splitlines() if line.startswith(f"headrace {name} ")]


def printed(words: list[str]) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def cells(line: str, mark: str) -> list[str]:
    return [cell.strip().replace(",", "") for cell in line.strip(f" {mark}\n").split(mark)]


@pytest.mark.parametrize("words", commands(TUTORIAL, "simulate"), ids=lambda words: words[3])
def test_the_tutorial_shows_what_the_simulator_prints(words: list[str]) -> None:
    policy = words[words.index("--scheduling-policy") + 1]
    (shown,) = re.findall(rf"^\| `{policy}` \|(.*)\|$", TUTORIAL, re.MULTILINE)
    (line,) = [line for line in printed(words).splitlines() if re.match(r"[│|] chat ", line)]
    *_, half, worst, tpot, _, met = cells(line, "│")
    assert cells(shown, "|") == [half, worst, tpot, met.removesuffix(" %")]


def test_the_sizing_example_shows_what_the_planner_prints_of_a_device() -> None:
    (words,) = commands(SIZING, "plan")
    without_load = words[: words.index("--requests")]
    output = printed(without_load).replace(",", "")
    table = SIZING.partition("## 2.")[2].partition("Then it simulates")[0]
    rows = [cells(row, "|") for row in re.findall(r"^\|.*\|$", table, re.MULTILINE)][2:]
    assert len(rows) == 5
    for _, *figures in rows:
        for figure in figures:
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", output), figure


def test_the_sizing_example_s_memory_is_that_of_the_compatibility_page() -> None:
    page = (DOCS / "reference" / "models.md").read_text()
    weights, contexts = re.findall(r"^\| `qwen3-8b` \|(.*)\|$", page, re.MULTILINE)
    gib, kib = re.findall(r"lists ([\d.]+) GiB of weights and ([\d.]+) KiB", SIZING)[0]
    assert cells(weights, "|")[2] == gib
    assert float(cells(contexts, "|")[0]) == float(kib)
