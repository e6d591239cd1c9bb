"""Write the benchmark page and its charts from the data files: ``python scripts/results.py``.

`docs/data/results.json` and the record of the headline figures hold every published figure once. This script turns
them into `docs/benchmarks.md`, one SVG chart per table that asks for one, and the rows of the README's table of
results.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "results.json"
HEADLINE = ROOT / "docs" / "data" / "headline.json"
"""The record of `benchmarks.headline`."""

PAGE = ROOT / "docs" / "benchmarks.md"
CHARTS = ROOT / "docs" / "images" / "results"

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;font-size:12px;fill:#24292f}'
    ".title{font-size:15px;font-weight:600}.note{fill:#57606a}.axis{stroke:#8c959f;stroke-dasharray:3 3}"
)

WIDTH = 960
LABELS = 430
"""Pixels at the left for the labels of the bars."""
SPACE = WIDTH - LABELS - 90
BAR = 15
GAP = 8
TOP = 74


class Bar(NamedTuple):
    """One bar: which series it belongs to, and its value."""

    series: int
    value: float
    shown: str


def load() -> dict[str, Any]:
    """The data files, with decimals spelt as they are written there; the recorded figures come first."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"), parse_float=Decimal)
    record = json.loads(HEADLINE.read_text(encoding="utf-8"), parse_float=Decimal)
    data["sections"][:0] = sections_of(record)
    return data


def sections_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections of the headline figures: all claims, and the tables behind them by where they were measured."""
    runs = [
        [name, each["date"], each["machine"], f"`{each['command']}`", each["seconds"]]
        for name, each in record["parts"].items()
        if not name.startswith("published")  # copies of cells below, which were measured elsewhere
    ]
    made = {
        "id": "headline-runs",
        "caption": "When and how the figures were made that are not in the sections below.",
        "columns": ["figures", "date", "processor", "command", "duration, s"],
        "rows": runs,
    }
    texts = {
        "simulated": "Llama-3.1-8B on a simulated H200: the engine's own scheduler, memory and drafting decisions; the "
        "time of each step is predicted from the device's data sheet. The figures are the same on every machine. "
        "[What was measured on a real H200](#h200) is below.",
        "measured": "Servers and engines on two cores that other work used at the same time. Ratios are medians of "
        "runs that take turns, or CPU time of one thread.",
    }
    found = [
        {
            "title": "Headline figures",
            "text": "Papers, vendors and guides claim such figures for inference systems, mostly on GPUs and without "
            "their conditions. Beside each claim are figures of Headrace, with a reason where they are worse.",
            "tables": [record["claims"], made],
        }
    ]
    for part, text in texts.items():
        shown = [
            table
            for name, each in record["parts"].items()
            if name.startswith(part)
            for table in each["tables"]
        ]
        section = {"title": f"Headline figures, {part}", "text": text, "tables": shown}
        if part == "simulated":
            section["command"] = "python -m benchmarks.headline"
        if shown:
            found.append(section)
    return found


def tables(data: dict[str, Any]) -> list[dict[str, Any]]:
    """All tables of all sections, in order."""
    return [table for section in data["sections"] for table in section["tables"]]


def shown(value: object) -> str:
    """A cell as text: numbers with thousands separators, nothing for a missing one."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int | Decimal) else str(value)


# -- page ------------------------------------------------------------------------------------------------


def page(data: dict[str, Any]) -> str:
    """The benchmark page as Markdown."""
    lines = [
        "# Benchmark results",
        "",
        "<!-- Written by scripts/results.py from docs/data/results.json and docs/data/headline.json. -->",
        "",
    ]
    lines += [data["intro"]]
    for section in data["sections"]:
        lines += ["", f"## {section['title']}", "", section["text"]]
        if "command" in section:
            lines += ["", "```bash", section["command"], "```"]
        for table in section["tables"]:
            lines += ["", *_table(table)]
            if "plot" in table:
                lines += ["", f"![{table['plot']['title']}](images/results/{table['id']}.svg)"]
            if "notes" in table:
                lines += ["", *(f"- {note}" for note in table["notes"])]
    return "\n".join([*lines, ""])


def _table(table: dict[str, Any]) -> list[str]:
    numeric = [
        all(row[at] is None or isinstance(row[at], int | Decimal) for row in table["rows"])
        for at in range(len(table["columns"]))
    ]
    rule = "|".join("---:" if right else "---" for right in numeric)
    rows = ["| " + " | ".join(shown(cell) for cell in row) + " |" for row in table["rows"]]
    return [table["caption"], "", "| " + " | ".join(table["columns"]) + " |", f"|{rule}|", *rows]


def readme_rows(data: dict[str, Any]) -> list[str]:
    """The README's table of results; each figure is a cell of the data file."""
    found = {table["id"]: table for table in tables(data)}
    lines = ["| measurement | Headrace | baseline | unit | baseline is |", "|---|---:|---:|---|---|"]
    for each in data["readme"]:
        ours, theirs = (
            shown(found[name]["rows"][row][at]) for name, row, at in (each["headrace"], each["baseline"])
        )
        lines.append(f"| {each['what']} | {ours} | {theirs} | {each['unit']} | {each['than']} |")
    return lines


# -- charts ----------------------------------------------------------------------------------------------


def charts(data: dict[str, Any]) -> dict[str, str]:
    """File name and SVG text of every chart."""
    return {f"{table['id']}.svg": chart(table) for table in tables(data) if "plot" in table}


def chart(table: dict[str, Any]) -> str:
    """Horizontal bars: one group per row of the table, one bar per series."""
    plot = table["plot"]
    groups = [(label, bars) for label, bars in (_group(table, row) for row in table["rows"]) if bars]
    reference = plot.get("reference", 0)
    most = max([bar.value for _, bars in groups for bar in bars] + [float(reference)])
    scale = SPACE / most
    parts: list[str] = []
    y = TOP
    for label, bars in groups:
        middle = y + BAR * len(bars) / 2 + 4
        parts.append(f'<text x="{LABELS - 10}" y="{middle:.1f}" text-anchor="end">{escape(label)}</text>')
        for bar in bars:
            length = bar.value * scale
            color = COLORS[bar.series % len(COLORS)]
            parts.append(
                f'<rect x="{LABELS}" y="{y}" width="{length:.1f}" height="{BAR - 2}" rx="2" fill="{color}"/>'
                f'<text x="{LABELS + length + 6:.1f}" y="{y + 11}" class="note">{bar.shown}</text>'
            )
            y += BAR
        y += GAP
    if reference:
        x = LABELS + float(reference) * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{y}" class="axis"/>')
    return _frame(plot, table["columns"], parts, y + 12)


def _group(table: dict[str, Any], row: list[Any]) -> tuple[str, list[Bar]]:
    plot = table["plot"]
    cells = [shown(cell) for cell in row]
    words = [each.format(*cells) for each in plot["label"] if cells[int(re.findall(r"{(\d+)}", each)[0])]]
    label = ", ".join(words).replace("`", "")
    bars = [
        Bar(number, float(row[at]), shown(row[at]))
        for number, at in enumerate(plot["series"])
        if row[at] is not None
    ]
    return label, bars


def _frame(plot: dict[str, Any], columns: list[str], parts: list[str], height: int) -> str:
    names = [columns[at] for at in plot["series"]]
    legend: list[str] = []
    x = 24
    if len(names) > 1:
        for number, name in enumerate(names):
            legend.append(
                f'<rect x="{x}" y="45" width="12" height="12" rx="2" fill="{COLORS[number]}"/>'
                f'<text x="{x + 18}" y="55">{escape(name)}</text>'
            )
            x += 36 + 7 * len(name)
    title = escape(plot["title"])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
            f' height="{height}" role="img" aria-label="{title}">',
            f"<title>{title}</title><style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>',
            f'<text x="24" y="30" class="title">{title}</text>',
            f'<text x="{WIDTH - 24}" y="55" class="note" text-anchor="end">{escape(plot["unit"])}</text>',
            *legend,
            *parts,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Write the page and the charts, and print the README's rows."""
    data = load()
    PAGE.write_text(page(data), encoding="utf-8")
    CHARTS.mkdir(parents=True, exist_ok=True)
    drawn = charts(data)
    for file in CHARTS.glob("*.svg"):
        if file.name not in drawn:
            file.unlink()
    for name, text in drawn.items():
        (CHARTS / name).write_text(text, encoding="utf-8")
    print("\n".join(readme_rows(data)))


if __name__ == "__main__":
    main()
