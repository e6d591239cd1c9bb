"""Pairs of requests that the semantic cache took for the same, for people to label: their form, and their labels.

A pair has both questions and no answer. Its ``id`` names tenant, partition and questions: each pair is recorded once. A
labelled line is a recorded line with ``label``; every other field must be as it was recorded. Pure.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

LABELS = {"same": True, "different": False}
"""Labels, and whether the cached answer would have been right."""

MOST_TEXT = 100_000
"""Characters of a question."""


class SeenPair(NamedTuple):
    """Two questions of a tenant, the second of which was asked, and the decision.

    ``verdict`` is ``serve``, or why not: ``judge_refused``, or the guard that forbids it. ``entries`` is the size of
    the partition, ``score`` the score of a candidate (None if a guard forbids it), ``least`` the threshold then.
    ``basis`` names what the score was made with.
    """

    id: str
    tenant: str
    cached: str
    asked: str
    similarity: float
    verdict: str
    entries: int
    score: float | None
    least: float
    basis: str

    def to_json(self) -> dict[str, Any]:
        """The line to export; ``label`` is to be filled in."""
        return {**self._asdict(), "label": None}


class BadLine(ValueError):
    """A line that is no labelled pair; the message names the field."""


def pair_id(tenant: str, partition: bytes, cached: str, asked: str) -> str:
    """The id of a pair."""
    named = json.dumps([tenant, partition.hex(), cached, asked])
    return hashlib.sha256(named.encode()).hexdigest()[:32]


def read_pair(line: str) -> tuple[SeenPair, bool] | None:
    """The pair of a line and whether it is labelled the same; None if it is not labelled.

    Raises:
        BadLine: it is not a labelled pair.
    """
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadLine("expected an object")
    expected = {*SeenPair._fields, "label"}
    if missing := sorted(expected - content.keys()):
        raise BadLine(f"{missing[0]}: missing")
    if unknown := sorted(content.keys() - expected):
        raise BadLine(f"{unknown[0][:50]}: unknown field")
    label = content["label"]
    if label is None:
        return None
    if not isinstance(label, str) or label not in LABELS:
        raise BadLine(f"label: expected same or different, got {json.dumps(label)[:50]}")
    return _checked(content), LABELS[label]


def _checked(content: Mapping[str, Any]) -> SeenPair:
    for name in ("id", "tenant", "cached", "asked", "verdict", "basis"):
        if not isinstance(content[name], str) or len(content[name]) > MOST_TEXT:
            raise BadLine(f"{name}: expected text of at most {MOST_TEXT} characters")
    entries, score = content["entries"], content["score"]
    if not isinstance(entries, int) or isinstance(entries, bool) or entries < 0:
        raise BadLine("entries: expected a number of entries")
    for name in ("similarity", "least", *(() if score is None else ("score",))):
        value = content[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise BadLine(f"{name}: expected a finite number")
    if content["verdict"] == "serve" and (score is None or score < content["least"]):
        raise BadLine("score: a pair that would be served has a score from least on")
    return SeenPair(*(content[name] for name in SeenPair._fields))
