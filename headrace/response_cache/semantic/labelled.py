"""Labelled requests from a file: pairs with equal or different answers, or requests with an intent each.

Files are CSV with a header, or JSON; the columns determine the kind. Requests of one intent share an answer.
"""

from __future__ import annotations

import csv
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_PAIR_COLUMNS = (
    ("text_a", "text_b", "same"),
    ("question1", "question2", "is_duplicate"),
    ("sentence1", "sentence2", "label"),
)
_QUESTION_COLUMNS = ("query", "text", "question", "utterance")
_INTENT_COLUMNS = ("intent", "category", "label", "answer")
_TRUE, _FALSE = frozenset({"1", "1.0", "true", "yes"}), frozenset({"0", "0.0", "false", "no"})


class BadRows(ValueError):
    """A file that cannot be read as labelled requests."""


class Pair(NamedTuple):
    """Two requests, and whether they have the same answer."""

    first: str
    second: str
    same: bool


class Question(NamedTuple):
    """A request and the name of its answer."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """Independent pairs: the first request is cached, the second is looked up."""

    name: str
    rows: tuple[Pair, ...]

    def halves(self) -> tuple[Pairs, Pairs]:
        """The first and the second half, in the order of the file."""
        cut = len(self.rows) // 2
        return Pairs(self.name, self.rows[:cut]), Pairs(self.name, self.rows[cut:])


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in the order of their arrival."""

    name: str
    rows: tuple[Question, ...]

    def shuffled(self, seed: int) -> Stream:
        """In a random order: files are often sorted by intent, and traffic is not."""
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        return Stream(self.name, tuple(rows))

    def halves(self) -> tuple[Stream, Stream]:
        """The first and the second half."""
        cut = len(self.rows) // 2
        return Stream(self.name, self.rows[:cut]), Stream(self.name, self.rows[cut:])


def read_rows(path: Path) -> Pairs | Stream:
    """Reads the labelled requests of a file.

    Raises:
        BadRows: the file cannot be read, or lacks the columns of either kind.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRows(f"{path} cannot be read: {error}") from error
    if path.suffix == ".json":
        return _from_json(path, text)
    table = csv.DictReader(io.StringIO(text, newline=""))  # newline="": quoted fields may contain line breaks
    columns = [name.strip().lower() for name in table.fieldnames or ()]
    table.fieldnames = columns
    for first, second, same in _PAIR_COLUMNS:
        if {first, second, same} <= set(columns):
            pairs = tuple(
                Pair(row[first] or "", row[second] or "", _same(row[same], path, line))
                for line, row in enumerate(table, 2)
            )
            return Pairs(path.stem, pairs)
    question = next((name for name in _QUESTION_COLUMNS if name in columns), None)
    intent = next((name for name in _INTENT_COLUMNS if name in columns), None)
    if question is None or intent is None:
        raise BadRows(
            f"{path} needs the columns text_a,text_b,same or query,intent; it has {','.join(columns)}"
        )
    return Stream(path.stem, tuple(Question(row[question] or "", row[intent] or "") for row in table))


def _from_json(path: Path, text: str) -> Stream:
    try:
        content: Any = json.loads(text)
    except ValueError as error:
        raise BadRows(f"{path} is not JSON: {error}") from error
    listed = content.get("train") if isinstance(content, dict) else content
    if not isinstance(listed, list) or not all(
        isinstance(row, list) and len(row) == 2 and all(isinstance(part, str) for part in row)
        for row in listed
    ):
        raise BadRows(f"{path} must be a list of [question, intent], or an object that has one as 'train'")
    return Stream(path.stem, tuple(Question(*row) for row in listed))


def _same(value: str | None, path: Path, line: int) -> bool:
    spelt = (value or "").strip().lower()
    if spelt not in _TRUE | _FALSE:
        raise BadRows(f"{path}, line {line}: same must be 0 or 1, got {value!r:.80}")
    return spelt in _TRUE
