"""User-facing text uses the field's terms: forbidden words stay out of pages, help texts, metrics, routes and messages.

Each entry names a private term or a pronoun, and what to write instead. Pages are read without commands, code spans and
link targets, since names of files and commands may stay; outputs in plain fences are read, for programs print them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import typer.main

from headrace.api.openapi import described
from headrace.cli import app
from headrace.config import PARTS
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from tests.structure.test_laws import nodes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "headrace"

FORBIDDEN = {
    # responses and their caches
    r"kept (answer|response)s?": "cached response",
    r"keeping (of )?(answers?|responses?)": "response caching",
    r"answers? (that (is|are|was|were) )?kept": "cached response",
    r"told again": "served from cache",
    r"near(est)? questions?": "similar request",
    r"likeness": "similarity",
    r"very same": "exact match, equal request",
    r"put away": "stored",
    # latency targets and admission
    r"wish(es|ed)?": "latency target, SLO",
    r"hop(e|es|ed|ing)": "latency target, SLO; or rewrite",
    r"at the gate": "rejected at admission",
    # preemption, eviction, retention
    r"loses? least": "lowest recomputation cost",
    r"what goes first": "eviction order",
    r"by worth|worth(s|est)? (the )?most|what (it|each|a block) is worth": "eviction policy",
    r"kept longer": "retention priority",
    # queueing
    r"stands? in line|place in (the )?line|first in line|head of the line": "queue, head of the queue",
    r"clocks? of (a|the|each) (class|tenant)(es|s)?": "virtual time",
    r"fills? (in )?when nobody calls": "backfill",
    r"gangs?": "batch, static batch",
    # prediction and replay
    r"fore(tell|tells|told|sight|see|sees|seen|saw)": "predict",
    r"outlook": "prediction",
    r"lives? again": "replay",
    # reporting
    r"told": "reported, printed, returned, recorded",
    r"promise[ds]?": "error bound, target, guarantee",
    r"refut(e|es|ed|ing)": "audits exceeded the error bound",
    r"pains?": "symptom",
    r"knobs?": "setting",
    r"spare[sd]": "saved",
    r"costs? beside": "overhead",
    r"contenders?": "peer",
    r"rac(es?|ing)(?! condition)": "peer comparison",
    # requests, clients and tenants are things
    r"callers?": "client",
    r"who asks?": "the client",
    r"who(m|so|som)?ever|whom": "a request, client or tenant is a thing",
    r"(no|some|any|every)body": "a request, client or tenant is a thing",
    r"he|him|his|himself": "a request, client or tenant is a thing",
    r"(requests?|sequences?|tenants?|clients?|servers?|streams?|those|ones?|prompts?) who": "that",
    r"\(of itself": "default",
}
"""What must not be there, as a pattern, and what to write in its place."""

PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(FORBIDDEN)})(?!\w)", re.IGNORECASE)

PAGES = sorted(
    [
        *(
            ROOT / name
            for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
        ),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)

DRAWINGS = sorted((ROOT / "docs").rglob("*.svg"))

ENGLISH = {"response_cache/rules/word_classes.py"}
"""Word lists of the semantic cache's guards: English that is compared, not shown."""

MODULES = sorted(
    file
    for file in PACKAGE.rglob("*.py")
    if "workload" not in file.parts  # texts for models to continue, not for users
    and file.relative_to(PACKAGE).as_posix() not in ENGLISH
)


class Found(NamedTuple):
    """A forbidden word: its line, the word, what to write."""

    line: int
    word: str
    instead: str


def forbidden_in(text: str, first_line: int = 1) -> list[Found]:
    return [
        Found(first_line + text.count("\n", 0, found.start()), found[0], instead_of(found[0]))
        for found in PATTERN.finditer(text)
    ]


def instead_of(words: str) -> str:
    return next(text for each, text in FORBIDDEN.items() if re.fullmatch(each, words, re.IGNORECASE))


def blank(found: re.Match[str]) -> str:
    """As many lines as before, without their text."""
    return "\n" * found[0].count("\n")


def readable(markdown: str) -> str:
    """A page without code: fences that name a language, code spans, link targets, comments."""
    text = re.sub(r"^```\w+\n.*?^```$", blank, markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]+`", "", text)
    return re.sub(r"\]\([^)\s]+\)", "]", text)


def messages_of(module: Path) -> Iterator[tuple[int, str]]:
    """Constant texts of a module that could be read by a user: those of several words that are no docstrings."""
    documentation = {
        id(node.value)
        for node in nodes(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            text = re.sub(r"`[^`\n]+`", "", node.value)
            if " " in text.strip():
                yield node.lineno, text


def helps_of(command: object, name: str) -> Iterator[tuple[str, str]]:
    """Help texts of a command, its options and the commands below it."""
    yield name, getattr(command, "help", None) or ""
    for each in getattr(command, "params", ()):
        yield f"{name} {each.opts[-1]}", getattr(each, "help", None) or ""
    for below, sub in getattr(command, "commands", {}).items():
        yield from helps_of(sub, f"{name} {below}")


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_pages() -> None:
    found = {shown(page): forbidden_in(readable(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert not {page: words for page, words in found.items() if words}


def test_messages() -> None:
    found = [
        (shown(module), words)
        for module in MODULES
        for line, text in messages_of(module)
        if (words := forbidden_in(text, line))
    ]
    assert not found


def test_drawings() -> None:
    found = [
        (shown(drawing), words)
        for drawing in DRAWINGS
        for text in ElementTree.parse(drawing).getroot().itertext()
        if "{" not in text and (words := forbidden_in(text))
    ]
    assert not found


def test_pages_of_the_server() -> None:
    for page in sorted(PACKAGE.rglob("*.html")):
        text = re.sub(r"<(script|style)>.*?</\1>", blank, page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not forbidden_in(re.sub(r"<[^>]*>", " ", text)), shown(page)


def test_help_texts() -> None:
    texts = list(helps_of(typer.main.get_command(app), "headrace"))
    assert len(texts) > 100
    assert not [(where, found) for where, text in texts for found in forbidden_in(text)]


def test_descriptions_of_options() -> None:
    hints = {name: hint for part in PARTS.values() for name, hint in part.__annotations__.items()}
    assert not [(name, found) for name, hint in hints.items() for found in forbidden_in(str(hint))]


def test_metrics() -> None:
    page = MetricsPage()
    Metrics(page)
    Goodput(page)
    texts = re.findall(r"^# HELP (\S+) (.*)$", page.render().decode(), re.MULTILINE)
    assert texts
    assert not [(name, found) for name, text in texts for found in forbidden_in(text)]


def test_routes() -> None:
    assert not [(row.path, found) for row in described() for found in forbidden_in(row.summary)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "preemption that loses least and happens to nobody more than three times",
            ["loses least", "nobody"],
        ),
        ("Tenants and partitions to whom audits have refuted the promise", ["whom", "refuted", "promise"]),
        ("**Kept answers**: similar ones, told again", ["Kept answers", "told again"]),
        ("answers a near question with a kept answer", ["near question", "kept answer"]),
        ("static: gangs, the textbook baseline", ["gangs"]),
        ("Deadlines and wishes", ["wishes"]),
        (
            "waits until his own key is spared by whoever foretold it",
            ["his", "spared", "whoever", "foretold"],
        ),
        ("only as callers' SLOs demand", ["callers"]),
        ("requests who wait are first in line", ["requests who", "first in line"]),
        ("max-num-seqs 2 (of itself 64)", ["(of itself"]),
        ("Which knob for which pain", ["knob", "pain"]),
        ("a race between engines; a contender", ["race", "contender"]),
    ],
)
def test_what_is_forbidden_is_found(text: str, words: list[str]) -> None:
    assert [found.word for found in forbidden_in(text)] == words


@pytest.mark.parametrize(
    "text",
    [
        "Preemption chooses the request that is cheapest to recompute, and preempts a request at most three times.",
        "Users who come from vLLM know these flags; the operator who runs the server chooses.",
        "Without a race condition, hopping or washing; the tracer traces; a promiscuous organ.",
        "The head of the queue is worth a look. This the theme: history, ship, whole.",
        "Cached responses are stored per tenant; the server returned what it had recorded.",
        "The process keeps running; blocks are kept until their memory is needed.",
    ],
)
def test_ordinary_text_passes(text: str) -> None:
    assert not forbidden_in(text)


def test_code_is_not_read_and_lines_are_counted() -> None:
    page = "# Race\n\n```bash\nheadrace race\n```\n\n`races.svg` [x](race.md)\n\nA gang.\n"
    assert [(found.line, found.word) for found in forbidden_in(readable(page))] == [(1, "Race"), (9, "gang")]
