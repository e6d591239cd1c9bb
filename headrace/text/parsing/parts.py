"""The parts that the parser returns, and the progress of a reader of calls."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Kind(Enum):
    """The kind of a part of an output."""

    CONTENT = auto()
    REASONING = auto()
    NAME = auto()  # begins a call
    ARGUMENTS = auto()  # a piece of the JSON text of the latest call's arguments


class Part(NamedTuple):
    """A part of an output. ``text`` is never empty."""

    kind: Kind
    text: str


class Progress(Enum):
    """Whether a reader of calls continues."""

    OPEN = auto()
    DONE = auto()  # the calls have ended
    FAILED = auto()  # the text that was not reported is no call
