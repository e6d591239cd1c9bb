"""Measure the recipes of the guide: ``python -m benchmarks.recipes``.

Each recipe of `docs/guide/recipes.md` has a command that serves and a command that simulates its load with the same
settings. This script runs the latter, and the same load with the settings with which ``headrace serve`` starts. The
figures go into `docs/data/recipes.json` and into the tables of the page. Both are the same on every machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.headline.record import short
from headrace.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide" / "recipes.md"
RECORD = ROOT / "docs" / "data" / "recipes.json"
LOAD = ("--device", "--degree", "--workload", "--requests", "--slo-ttft", "--slo-tpot", "--slo-e2e", "--acceptance")
"""Flags of a simulation that describe the machine and the load; all others are settings of the recipe."""

AS_STARTED = ("--max-num-seqs", "64")
"""The number of slots of a server; a simulation takes the device's own."""

BEGIN, END = "<!-- figures of benchmarks/recipes.py -->", "<!-- end of figures -->"
COLUMNS = (
    *("settings", "within the targets, %", "TTFT p50, ms", "TTFT p99, ms", "TPOT p99, ms"),
    *("output tokens/s", "prompt tokens cached, %"),
)


class Recipe(NamedTuple):
    """A recipe of the page: its title, and the words of its two commands."""

    title: str
    serve: list[str]
    simulate: list[str]

    def as_started(self) -> list[str]:
        """The simulation without the recipe's settings."""
        words, kept = self.simulate[3:], self.simulate[:3]
        for flag, value in zip(words[::2], words[1::2], strict=True):
            kept += [flag, value] if flag in LOAD and flag != "--acceptance" else []
        return [*kept, *AS_STARTED]


def read_recipes(text: str) -> list[Recipe]:
    """The recipes of the page, in order."""
    found = []
    for section in text.split("\n## ")[1:]:
        blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        commands = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
        if BEGIN in section:
            serve, simulate = (next(each for each in commands if each[1] == name) for name in ("serve", "simulate"))
            found.append(Recipe(section.splitlines()[0], serve, simulate))
    return found


def simulated(words: Sequence[str], requests: int | None = None) -> dict[str, Any]:
    """The report of a simulation; ``requests`` replaces the number of requests."""
    fewer = () if requests is None else ("--requests", str(requests))  # the last one counts
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "report.json"
        app([*words[1:], *fewer, "--output", str(path)], standalone_mode=False)
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def figures(name: str, report: dict[str, Any], tenant: str = "") -> list[Any]:
    """The row of a simulation; of one tenant, if it is named."""
    return [name, report]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
