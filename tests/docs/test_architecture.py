"""ARCHITECTURE.md: one page, whose files exist and whose reading list tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()

A_DAY = 8000
"""Lines that an engineer reads in a day, with breaks."""


def reading_list() -> dict[str, int]:
    table = PAGE.split("## What to read in a day")[1].split("\n## ")[0]
    return {
        file: int(lines.replace(",", ""))
        for file, lines in re.findall(r"^\| `(\S+)` \| ([\d,]+) \|", table, re.M)
    }


def test_it_is_one_page():
    assert len(PAGE.splitlines()) <= 145


def test_every_file_that_it_names_exists():
    named = re.findall(r"`(headrace/[\w/]+(?:\.py)?)`", PAGE)
    assert len(named) > 15
    for name in named:
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([\w/.]+)\)", PAGE):
        assert (ROOT / name).exists(), name
    rooms = "core|compute|service|response_cache|api|text|tuning|observe|lab|fleet|wiring|llm|tests"
    room = re.compile(rf"`((?:{rooms})/[\w/]*(?:\.py)?)`")
    for name in room.findall(PAGE):
        assert (ROOT / "headrace" / name).exists() or (ROOT / name).exists(), name


def test_the_reading_list_can_be_read_in_a_day():
    listed = reading_list()
    assert len(listed) >= 12
    for file, lines in listed.items():
        real = len((ROOT / file).read_text().splitlines())
        assert abs(real - lines) <= max(20, real // 10), f"{file} has {real} lines, the page says {lines}"
    [total] = re.findall(r"^\| together \| ([\d,]+) \|", PAGE, re.M)
    assert int(total.replace(",", "")) == sum(listed.values()) <= A_DAY
