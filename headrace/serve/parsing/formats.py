"""How a model family writes reasoning and tool calls, as data.

A format is a list of markers and what follows each of them; `machine` reads any of them. `catalogue` has the formats
of known families.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Arguments(Enum):
    """How the arguments of a call are written."""

    JSON = auto()  # an object, which is passed on as it is
    LITERAL = auto()  # an object with bare keys and strings between marks of their own
    PYTHON = auto()  # keyword arguments
    XML = auto()  # one element per argument


@dataclass(frozen=True, slots=True)
class Opening:
    """A marker after which calls may follow.

    Attributes:
        begin: the marker; empty where the call itself is the beginning.
        end: markers that may follow the calls.
        arguments: how the arguments are written.
        header: what stands between marker and arguments, with the group ``name``; None where a call is an object
            with the keys ``name`` and ``arguments``, or a Python call.
        objects: also read objects with the keys ``name`` and ``arguments`` where there is a header.
        first: the character with which the calls must begin, where there is no marker.
        known: read only calls of functions that the request names. For openings that occur in other text too.
        quotes: the marks around strings of literals.
        inner: markers inside of the header.
    """

    begin: str
    end: tuple[str, ...] = ()
    arguments: Arguments = Arguments.JSON
    header: re.Pattern[str] | None = None
    objects: bool = False
    first: str = ""
    known: bool = False
    quotes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """How a call is written: the texts around its name and its arguments.

    ``trigger`` is the beginning of ``before_name`` that no other text has; empty where a call is plain JSON. ``single``
    says that a turn has one call. The arguments are a JSON object; with ``python`` keyword arguments, and with
    ``quote`` members whose strings stand between that mark, both without the brackets around them.
    """

    before_name: str
    before_arguments: str
    end: str
    trigger: str = ""
    single: bool = False
    python: bool = False
    quote: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's way to call tools.

    Attributes:
        name: for ``--tool-call-parser``.
        openings: what begins calls.
        signs: a chat template belongs to the format if it contains all texts of one of these groups.
        silent: markers without meaning of their own, which are left out of the content.
        written: how to write a call, for constraints.
        short_ids: make ids of nine letters and digits, which some templates demand.
    """

    name: str
    openings: tuple[Opening, ...]
    signs: tuple[tuple[str, ...], ...]
    silent: tuple[str, ...] = ()
    written: Written | None = None
    short_ids: bool = False

    def markers(self) -> frozenset[str]:
        """All texts that the format needs to see, also where they are special tokens."""
        found = set(self.silent)
        for opening in self.openings:
            found |= {opening.begin, *opening.end, *opening.quotes, *opening.inner}
        return frozenset(found - {""})


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A family's way to write down its reasoning.

    Attributes:
        name: for ``--reasoning-parser``.
        begin: markers before it.
        end: markers after it.
        signs: as in `ToolFormat`.
        first: whether it can only be the beginning of an answer.
        assumed: whether an answer begins with reasoning though no marker says so.
        silent: as in `ToolFormat`.
    """

    name: str
    begin: tuple[str, ...]
    end: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...]
    first: bool = True
    assumed: bool = False
    silent: tuple[str, ...] = ()

    def markers(self) -> frozenset[str]:
        """All texts that the format needs to see, also where they are special tokens."""
        return frozenset({*self.begin, *self.end, *self.silent})

    def is_open(self, prompt: str) -> bool:
        """Whether the answer to ``prompt`` begins inside the reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(tuple(marker.rstrip() for marker in self.begin)) or (
            self.assumed and not prompt.endswith(self.end)
        )
