"""Measure the recipes of the guide: ``python -m benchmarks.recipes``.

Each recipe of `docs/guide/recipes.md` has a command that serves and a command that simulates its load with the same
settings. This script runs the latter, and the same load with the settings with which ``headrace serve`` starts. The
figures go into `docs/data/recipes.json` and into the tables of the page. Both are the same on every machine.
"""

from __future__ import annotations

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
from benchmarks.stage import markdown_head, markdown_row, plain_parser
from headrace.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide" / "recipes.md"
RECORD = ROOT / "docs" / "data" / "recipes.json"
LOAD = (
    "--device",
    "--degree",
    "--workload",
    "--requests",
    "--slo-ttft",
    "--slo-tpot",
    "--slo-e2e",
    "--acceptance",
)
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
            serve, simulate = (
                next(each for each in commands if each[1] == name) for name in ("serve", "simulate")
            )
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


def figures(recipe: Recipe, report: dict[str, Any]) -> list[float | int | None]:
    """The numbers of a row: those of the first tenant, and the output rate of all."""
    first = recipe.simulate[recipe.simulate.index("--workload") + 1].partition("tenant=")[2].partition(",")[0]
    tenant = next(each for each in report["tenants"] if each["name"] == first)
    summary, met = report["summary"], tenant["slo_share"]
    return [
        None if met is None else short(100.0 * met),
        *(short(1e3 * tenant["ttft"][name]) for name in ("p50", "p99")),
        short(1e3 * tenant["tpot"]["p99"]),
        short(summary["output_tokens_per_second"]),
        short(report["facts"]["cache_hit_percent"]),
    ]


def table(rows: Sequence[tuple[str, Sequence[float | int | None]]]) -> str:
    """The table of one recipe."""
    numbers = ((name, *("" if n is None else f"{n:,}" for n in row)) for name, row in rows)
    return "\n".join((markdown_head(COLUMNS), *map(markdown_row, numbers)))


def with_tables(text: str, record: dict[str, Any]) -> str:
    """The page with the tables of the record."""
    sections = text.split("\n## ")
    for at, section in enumerate(sections):
        if BEGIN in section:
            before, _, rest = section.partition(BEGIN)
            after = rest.partition(END)[2]
            rows = record[section.splitlines()[0]]
            sections[at] = f"{before}{BEGIN}\n\n{table(list(rows.items()))}\n\n{END}{after}"
    return "\n## ".join(sections)


def main() -> None:
    """Measure, print, write."""
    parser = plain_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests; prints and writes nothing")
    args = parser.parse_args()
    record = {}
    for recipe in read_recipes(PAGE.read_text(encoding="utf-8")):
        runs = {"as started": recipe.as_started(), "this recipe": recipe.simulate}
        record[recipe.title] = {
            name: figures(recipe, simulated(words, 60 if args.quick else None))
            for name, words in runs.items()
        }
        print(f"\n{recipe.title}\n{table(list(record[recipe.title].items()))}", flush=True)
    if not args.quick:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


if __name__ == "__main__":
    main()
