"""The benchmark page, its charts and the README's results are what the data file says."""

from __future__ import annotations

import importlib.util
import re
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

LONGEST_LABEL = 64
"""Characters of a label that fit beside the bars."""

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
DATA = SCRIPT.load()
TABLES: list[dict[str, Any]] = SCRIPT.tables(DATA)


def named(table: dict[str, Any]) -> str:
    return str(table["id"])


def test_the_page_is_up_to_date() -> None:
    assert SCRIPT.PAGE.read_text(encoding="utf-8") == SCRIPT.page(DATA)


def test_the_charts_are_up_to_date() -> None:
    drawn = SCRIPT.charts(DATA)
    assert len(drawn) >= 20
    assert {file.name for file in SCRIPT.CHARTS.iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (SCRIPT.CHARTS / name).read_text(encoding="utf-8") == text


def test_every_section_with_figures_has_a_picture() -> None:
    small = {"Machines", "Soak test", "Keys and values in 8 bits"}
    small |= {"Headline figures", "Headline figures, measured"}  # each row has its own unit
    for section in DATA["sections"]:
        assert section["title"] in small or any("plot" in table for table in section["tables"]), section[
            "title"
        ]


def test_a_cell_has_one_number() -> None:
    for table in TABLES:
        assert table["caption"].endswith((".", "`).")), named(table)
        for row in table["rows"]:
            assert len(row) == len(table["columns"]), (named(table), row)
            assert any(isinstance(cell, int | Decimal) for cell in row), (named(table), row)
            for cell in row:
                if isinstance(cell, str):
                    assert not re.search(r"\d\s*[/\u2013]\s*\d", cell), cell


@pytest.mark.parametrize("table", [table for table in TABLES if "plot" in table], ids=named)
def test_a_chart_shows_every_figure_of_its_series_as_a_bar(table: dict[str, Any]) -> None:
    svg = ElementTree.fromstring(SCRIPT.chart(table))
    texts = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text") if each.text]
    bars = [each for each in svg.iter("{http://www.w3.org/2000/svg}rect") if each.get("rx") == "2"]
    series = table["plot"]["series"]
    figures = [row[at] for row in table["rows"] for at in series if row[at] is not None]
    assert all(SCRIPT.shown(figure) in texts for figure in figures)
    labels = [
        each.text for each in svg.iter("{http://www.w3.org/2000/svg}text") if each.get("text-anchor") == "end"
    ]
    assert all(len(label or "") <= LONGEST_LABEL for label in labels)
    assert len(bars) == len(figures) + (len(series) if len(series) > 1 else 0)  # and the legend's


def test_the_readme_has_at_most_five_results_and_they_are_the_data_file_s() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    rows = SCRIPT.readme_rows(DATA)
    assert 3 <= len(rows) - 2 <= 5
    at = lines.index(rows[0])
    assert lines[at : at + len(rows)] == rows
    assert not lines[at + len(rows)].startswith("|")


def test_commands_of_the_sections_exist() -> None:
    for section in DATA["sections"]:
        script = re.match(r"python -m benchmarks\.(\w+)", section.get("command", ""))
        if script:
            there = ROOT / "benchmarks" / script[1]
            assert there.with_suffix(".py").is_file() or (there / "__main__.py").is_file()
