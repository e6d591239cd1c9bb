"""Runs a client's cases and prints one JSON line per case: the client's program prints nothing else.

A program is called with the base URL and the model of a server on the built-in model, then those of a server that
plays a script. The first answers freely and under grammars; the second calls a tool and then tells its result.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple

QUESTION = "How warm is it in Paris?"
STORY = "Tell me a story about a fox."
ANSWER = "It is 21 degrees in Paris."
DEGREES = '{"degrees": 21}'
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ANIMAL_SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["fox", "hen"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["kind", "age"],
    "additionalProperties": False,
}


class Place(NamedTuple):
    """A server: its address without /v1, and its model's name."""

    root: str
    model: str

    @property
    def url(self) -> str:
        """The base URL as OpenAI's clients want it."""
        return f"{self.root}/v1"


BUILTIN, SCRIPTED = Place(sys.argv[1], sys.argv[2]), Place(sys.argv[3], sys.argv[4])


def check_animal(value: dict[str, object]) -> None:
    """The value follows `ANIMAL_SCHEMA`."""
    assert set(value) == {"kind", "age"}, value
    assert value["kind"] in ("fox", "hen"), value
    assert isinstance(value["age"], int), value


def run(package: str, cases: dict[str, Callable[[], None]]) -> None:
    """Run each case, and print its outcome."""
    for name, case in cases.items():
        reason = ""
        try:
            case()
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
        line = {"version": version(package), "case": name, "reason": " ".join(reason.split())[:300]}
        print(json.dumps(line), flush=True)
