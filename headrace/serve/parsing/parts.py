"""What the parser reports while it reads an answer, and how far a reader of calls has come."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Kind(Enum):
    """What a piece of an answer is."""

    CONTENT = auto()
    REASONING = auto()
    NAME = auto()  # begins a call
    ARGUMENTS = auto()  # a piece of the JSON text of the latest call's arguments


class Part(NamedTuple):
    """A piece of an answer. ``text`` is never empty."""

    kind: Kind
    text: str


class Progress(Enum):
    """Whether a reader of calls goes on."""

    OPEN = auto()
    DONE = auto()  # the calls have ended
    FAILED = auto()  # what was not reported yet is no call
