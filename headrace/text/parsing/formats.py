"""The format in which a model family writes reasoning and tool calls, as data.

A format is a list of markers and what follows each of them; `machine` parses all formats. `catalogue` has the formats
of known families.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Arguments(Enum):
    """The notation of a call's arguments."""

    JSON = auto()  # an object, which is passed on as it is
    LITERAL = auto()  # an object with bare keys, and with special marks around strings
    PYTHON = auto()  # keyword arguments
    XML = auto()  # one element per argument


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a call with one for each argument.

    Attributes:
        argument: matches the text before a value, with the argument's name as its group.
        begin: the beginning of that text.
        named: the text behind the name; no line break comes before it.
        end: the text behind a value.
        close: the end of the call.
        lines: values stand between line breaks, which do not belong to them.
    """

    argument: re.Pattern[str]
    begin: str
    named: str
    end: str
    close: str
    lines: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """A marker after which calls may follow.

    Attributes:
        begin: the marker; empty if calls have none.
        end: markers that may follow the calls.
        arguments: the notation of the arguments.
        header: the text between marker and arguments, with the group ``name``; None if a call is an object with the
            keys ``key`` and ``arguments``, or a Python call.
        objects: with a header, also read objects with the keys ``name`` and ``arguments``.
        first: without a marker, the character with which the calls must begin.
        known: read only calls of the request's functions, for openings that also occur in other text.
        quotes: the marks around strings of literals.
        inner: markers inside the header.
        elements: of arguments in `Arguments.XML`.
        key: the key of the name of a call that is an object.
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
    elements: Elements | None = None
    key: str = "name"


@dataclass(frozen=True, slots=True)
class Written:
    """The texts around the name and the arguments of a call.

    ``trigger`` is the beginning of ``before_name`` that occurs in no other text; empty if a call is plain JSON.
    ``single``: a turn has one call. The arguments are a JSON object; with ``python`` they are keyword arguments, with
    ``quote`` the members of an object with that mark around strings. Both omit the outer brackets.
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
    """A model family's format of tool calls.

    Attributes:
        name: the value for ``--tool-call-parser``.
        openings: the beginnings of calls.
        signs: a chat template belongs to the format if it contains all texts of one of these groups.
        written: how to write a call, for constraints.
        silent: markers that are removed from the content.
        short_ids: make ids of nine letters and digits, which some templates require.
        aliases: vLLM's other names of the format, which ``--tool-call-parser`` takes too.
    """

    name: str
    openings: tuple[Opening, ...]
    signs: tuple[tuple[str, ...], ...]
    written: Written
    silent: tuple[str, ...] = ()
    short_ids: bool = False
    aliases: tuple[str, ...] = ()

    def markers(self) -> frozenset[str]:
        """All texts that the format needs to see, also where they are special tokens."""
        found = set(self.silent)
        for opening in self.openings:
            found |= {opening.begin, *opening.end, *opening.quotes, *opening.inner}
        return frozenset(found - {""})


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A model family's format of reasoning.

    Attributes:
        name: the value for ``--reasoning-parser``.
        begin: markers before it.
        end: markers after it.
        signs: as in `ToolFormat`.
        first: whether reasoning is only possible at the beginning of an output.
        assumed: whether an output begins with reasoning even without a marker.
        silent: as in `ToolFormat`.
        aliases: vLLM's other names of the format, which ``--reasoning-parser`` takes too.
    """

    name: str
    begin: tuple[str, ...]
    end: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...]
    first: bool = True
    assumed: bool = False
    silent: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def markers(self) -> frozenset[str]:
        """All texts that the format needs to see, also where they are special tokens."""
        return frozenset({*self.begin, *self.end, *self.silent})

    def is_open(self, prompt: str) -> bool:
        """Whether the output for ``prompt`` begins inside the reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(tuple(marker.rstrip() for marker in self.begin)) or (
            self.assumed and not prompt.endswith(self.end)
        )
