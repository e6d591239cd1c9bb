"""The corpus: texts as models write them, and the messages that they are. One file per tool format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headrace.text.parsing.catalogue import REASONING_FORMATS, TOOL_FORMATS
from headrace.text.parsing.machine import Machine
from headrace.text.parsing.reader import Kind

FOLDER = Path(__file__).parent / "corpus"
TOOLS = {each.name: each for each in TOOL_FORMATS}
REASONING = {each.name: each for each in REASONING_FORMATS}

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "calculate_triangle_area": {"base": {"type": "integer"}, "height": {"type": "number"}},
    "search_flights": {"legs": {"type": "array"}, "nonstop": {"type": "boolean"}},
    "get_time": {},
    "send_email": {"to": {"type": "array"}},
    "set_alarm": {
        "hour": {"type": "integer"},
        "minute": {"type": "integer"},
        "enabled": {"type": "boolean"},
        "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "write_file": {"path": {"type": "string"}, "content": {"type": "string"}},
    "query_db": {},
    "math.hypot": {"x": {"type": "number"}, "y": {"type": ["number", "null"]}},
    "convert_currency": {"amount": {"type": "number"}},
    "translate": {},
    "create_event": {"when": {"type": "object"}, "tags": {"type": "array"}},
    "update_user": {"id": {"type": "integer"}, "profile": {"type": "object"}},
    "run": {},
    "render": {},
}


@dataclass(frozen=True)
class Case:
    format: str
    note: str
    text: str
    content: str
    reasoning: str
    calls: tuple[dict[str, Any], ...]
    reasoning_format: str | None = None
    opened: bool = False

    def __str__(self) -> str:
        return f"{self.format}: {self.note}"


@cache
def cases(name: str) -> tuple[Case, ...]:
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    default = {"reasoning_format": name if name == "harmony" else None}
    rows = [default | json.loads(line) for line in lines if line]
    return tuple(Case(name, calls=tuple(row.pop("calls")), **row) for row in rows)


def machine_for(case: Case) -> Machine:
    reasoning = REASONING[case.reasoning_format] if case.reasoning_format else None
    return Machine(TOOLS[case.format], reasoning, opened=case.opened, schemas=SCHEMAS)


def read(machine: Machine, pieces: Iterable[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls with the text of their arguments."""
    parts = [part for piece in pieces for part in machine.push(piece)] + machine.finish()
    content = "".join(text for kind, text in parts if kind is Kind.CONTENT)
    reasoning = "".join(text for kind, text in parts if kind is Kind.REASONING)
    calls: list[tuple[str, str]] = []
    for kind, text in parts:
        if kind is Kind.NAME:
            calls.append((text, ""))
        elif kind is Kind.ARGUMENTS:
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, reasoning, calls
