"""Decisions have their four parts, the index lists them all, and comments in the code lead to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/decisions"
INDEX = FOLDER / "index.md"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page != INDEX)
PARTS = ["Question", "Choice", "Evidence", "Rejected"]
LEAST_LINKS = 20
"""Comments in the code: fewer mean that a pattern here no longer finds them."""


class Decision(NamedTuple):
    """A section of a page: its place as in a link, its title, and its text."""

    place: str
    title: str
    text: str


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def decisions_of(page: Path) -> list[Decision]:
    sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    parted = [section.partition("\n") for section in sections]
    return [Decision(f"{page.name}#{anchor(title)}", title, text) for title, _, text in parted]


DECISIONS = [each for page in PAGES for each in decisions_of(page)]


def links_of_code() -> list[tuple[str, str]]:
    """File, and page and anchor, of each comment that names a decision."""
    files = [
        file
        for folder in ("headrace", "tests", "scripts", "tools", "benchmarks")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".h", ".cpp", ".ts"} and "node_modules" not in file.parts
    ]
    return [
        (file.relative_to(ROOT).as_posix(), place)
        for file in files
        for place in re.findall(r"docs/decisions/([a-z-]+\.md(?:#[\w-]*)?)", file.read_text(encoding="utf-8"))
    ]


def test_a_decision_has_its_four_parts_in_order() -> None:
    assert not [
        (decision.place, parts)
        for decision in DECISIONS
        if (parts := re.findall(r"^\*\*(\w+)\.\*\* \S", decision.text, re.MULTILINE)) != PARTS
    ]


def test_pages_have_decisions_and_anchors_differ() -> None:
    assert all(decisions_of(page) for page in PAGES)
    places = [each.place for each in DECISIONS]
    assert not {place for place in places if places.count(place) > 1}


def test_the_index_lists_each_decision_with_its_question() -> None:
    listed = re.findall(r"^- \[(.*)\]\((.*)\): (.*)$", INDEX.read_text(encoding="utf-8"), re.MULTILINE)
    written = []
    for each in DECISIONS:
        question = re.search(r"^\*\*Question\.\*\* (.*\?)$", each.text, re.MULTILINE)
        assert question, f"{each.place}: the question must be one line that ends with a question mark"
        written.append((each.title, each.place, question[1]))
    assert sorted(listed) == sorted(written)


def test_comments_of_the_code_lead_to_a_decision() -> None:
    places = {each.place for each in DECISIONS}
    links = [each for each in links_of_code() if not each[0].endswith("tests/docs/test_decisions.py")]
    assert not [f"{file}: {place}" for file, place in links if place not in places]
    assert len(links) >= LEAST_LINKS
