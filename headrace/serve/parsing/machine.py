"""The machine that reads an answer: text in by pieces of any size, parts out.

    text ──marker──> reasoning ──end──> text ──opening──> calls ──end or failure──> text

The parts depend on the text alone, not on how it is cut: the machine decides nothing before it is certain, and holds
back only what may become a marker or a call, and white space beside them. It raises nothing, and what is no reasoning
and no call is content.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from headrace.serve.parsing.formats import Arguments, Opening, ReasoningFormat, ToolFormat
from headrace.serve.parsing.json_calls import JsonCalls
from headrace.serve.parsing.named_calls import NamedCall
from headrace.serve.parsing.parts import Kind, Part, Progress
from headrace.serve.parsing.python_calls import PythonCalls
from headrace.serve.parsing.reader import Either, Reader
from headrace.serve.parsing.scan import held_from
from headrace.serve.parsing.typed import Schemas
from headrace.serve.parsing.xml_calls import XmlCall


class _Before(Enum):
    """What the latest part was, which decides what becomes of white space."""

    NOTHING = auto()
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class Machine:
    """Reads one answer.

    Args:
        tools: how calls are written; None where there are none to be read.
        reasoning: how reasoning is written; None where there is none to be read.
        opened: whether the prompt has opened the reasoning.
        schemas: of the arguments of the functions that may be called.

    Attributes:
        spans: where in the text the reasoning is, markers included, as pairs of begin and end in characters; the last
            end is None while the reasoning goes on.
        called: whether the arguments of a call are whole.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        opened: bool = False,
        schemas: Schemas | None = None,
    ) -> None:
        self.spans: list[tuple[int, int | None]] = []
        self.called = False
        self._openings = tools.openings if tools else ()
        self._thinking = reasoning
        self._schemas = schemas or {}
        self._silent = frozenset((*(tools.silent if tools else ()), *(reasoning.silent if reasoning else ())))
        begins = {opening.begin for opening in self._openings if opening.begin}
        if reasoning is not None and not reasoning.first:
            begins |= set(reasoning.begin)
        self._markers = tuple(sorted(begins | self._silent, key=lambda marker: (-len(marker), marker)))
        self._pattern = re.compile("|".join(map(re.escape, self._markers))) if self._markers else None
        thinks_first = reasoning is not None and reasoning.first
        self._at_first = thinks_first or any(not opening.begin for opening in self._openings)
        self._pushed = 0
        self._held = ""  # text that has not been read
        self._gap = ""  # white space that has been read, before what is not known yet
        self._before = _Before.NOTHING
        self._said = False  # whether there is content
        self._reasoning = False
        self._fresh = True  # whether the present reasoning has reported nothing yet
        self._reader: Reader | None = None
        self._marker = ""  # the one that the reader follows
        self._following: tuple[str, ...] = ()  # the ones that may follow its calls
        self._ends: tuple[str, ...] = ()  # the same, once the calls have ended
        self._parts: list[Part] = []
        if opened and reasoning is not None:
            self._begin_reasoning(0)

    def push(self, text: str) -> list[Part]:
        """Take more of the answer; what is certain now."""
        return self._read(text, final=False)

    def finish(self) -> list[Part]:
        """The end of the answer: all that was held back."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> list[Part]:
        self._parts = []
        self._pushed += len(text)
        self._held += text
        while self._step(final):
            pass
        return self._parts

    def _step(self, final: bool) -> bool:
        """Go on by one step; False if there is nothing to do before more text comes."""
        if self._reader is not None:
            return self._read_calls(self._reader, final)
        if self._reasoning:
            return self._read_reasoning(final)
        if self._ends:
            return self._skip_ends(final)
        if self._at_first and self._before is not _Before.TEXT:
            return self._read_first(final)
        return self._read_text(final)

    # text

    def _read_first(self, final: bool) -> bool:
        """What has no marker of its own, or one that only counts at the beginning."""
        at = len(self._held) - len(self._held.lstrip())
        text = self._held[at:]
        waits = not text and not final
        if self._thinking is not None and self._thinking.first and self._before is _Before.NOTHING:
            for marker in self._thinking.begin:
                if text.startswith(marker):
                    self._held = text
                    self._begin_reasoning(self._offset())
                    self._held = text[len(marker) :]
                    return True
                waits = waits or (not final and marker.startswith(text))
        for opening in self._openings:
            if text and not opening.begin and text.startswith(opening.first):
                self._open(opening, at, at)
                return True
        self._at_first = waits
        return not waits

    def _read_text(self, final: bool) -> bool:
        found = self._pattern.search(self._held) if self._pattern is not None else None
        sure = len(self._held) if final else held_from(self._held, self._markers)
        if found is None:
            self._say(self._held[:sure])
            self._held = self._held[sure:]
            if final:
                self._end_text()
            return False
        if sure <= found.start():
            return False  # a longer marker may begin here
        marker = found[0]
        opening = next((each for each in self._openings if each.begin == marker), None)
        if opening is not None:
            self._open(opening, found.start(), found.end())
            return True
        self._say(self._held[: found.start()])
        self._held = self._held[found.start() :]
        if marker not in self._silent:
            self._begin_reasoning(self._offset())
        self._held = self._held[len(marker) :]
        return True

    def _say(self, text: str) -> None:
        """Content. The white space at its end waits for what follows, where that may be a call."""
        bare = text.rstrip() if self._pattern is not None or self._at_first else text
        if bare:
            said = self._gap + bare
            self._gap = ""
            if self._before is _Before.REASONING or (self._before is _Before.CALL and not self._said):
                said = said.lstrip()
            if said:
                parted = self._before is _Before.REASONING and self._said
                self._add(Kind.CONTENT, "\n" + said if parted else said)
                self._before, self._said = _Before.TEXT, True
        self._gap += text[len(bare) :]

    def _end_text(self) -> None:
        if self._before in (_Before.TEXT, _Before.NOTHING):
            self._add(Kind.CONTENT, self._gap)
        self._gap = ""

    def _offset(self) -> int:
        """Where in the answer `_held` begins."""
        return self._pushed - len(self._held)

    # reasoning

    def _begin_reasoning(self, start: int) -> None:
        self.spans.append((start, None))
        self._reasoning = self._fresh = True
        self._gap = ""

    def _read_reasoning(self, final: bool) -> bool:
        assert self._thinking is not None
        found = [(at, end) for end in self._thinking.end if (at := self._held.find(end)) >= 0]
        if not found:
            sure = len(self._held) if final else held_from(self._held, self._thinking.end)
            self._think(self._held[:sure])
            self._held = self._held[sure:]
            return False
        at, end = min(found)
        self._think(self._held[:at])
        self._held = self._held[at + len(end) :]
        self.spans[-1] = (self.spans[-1][0], self._offset())
        self._reasoning, self._gap, self._before = False, "", _Before.REASONING
        return True

    def _think(self, text: str) -> None:
        """Reasoning, without the white space at its begin and end."""
        bare = text.rstrip()
        if bare and self._fresh:
            parted = len(self.spans) > 1
            self._add(Kind.REASONING, "\n" + bare.lstrip() if parted else bare.lstrip())
            self._fresh = False
        elif bare:
            self._add(Kind.REASONING, self._gap + bare)
        if bare:
            self._gap = ""
        if not self._fresh:
            self._gap += text[len(bare) :]

    # calls

    def _open(self, opening: Opening, start: int, end: int) -> None:
        """Read calls from ``end`` on; what stands before the marker at ``start`` is content."""
        self._say(self._held[:start])
        self._marker, self._held = self._held[start:end], self._held[end:]
        self._following = opening.end
        self._reader = self._choose(opening)

    def _choose(self, opening: Opening) -> Reader:
        known = frozenset(self._schemas) if opening.known else None
        if opening.arguments is Arguments.PYTHON:
            return PythonCalls(known, listed=opening.first == "[")
        if opening.header is None:
            return JsonCalls(known)
        named: Reader
        if opening.arguments is Arguments.XML:
            named = XmlCall(opening.header, self._schemas, known)
        else:
            named = NamedCall(opening.header, opening.quotes, known)
        return Either(JsonCalls(known), named) if opening.objects else named

    def _read_calls(self, reader: Reader, final: bool) -> bool:
        parts = reader.push(self._held, final)
        self._held = ""
        self.called = self.called or reader.closed > 0
        if parts:
            self._gap, self._before = "", _Before.CALL
            for part in parts:
                self._add(part.kind, part.text)
        if reader.progress is Progress.OPEN:
            return False
        self._held, self._reader = reader.rest, None
        if reader.progress is Progress.DONE:
            self._ends = self._following
        elif self._marker:
            self._say(self._marker)
        else:
            self._at_first = False
        return True

    def _skip_ends(self, final: bool) -> bool:
        """Leave out the markers that follow calls."""
        text = self._held.lstrip()
        for end in self._ends:
            if text.startswith(end):
                self._held = text[len(end) :]
                return True
        if not final and any(end.startswith(text) for end in self._ends):
            return False
        self._ends = ()
        return True

    def _add(self, kind: Kind, text: str) -> None:
        """Report a piece; one that goes on with the last of its kind is joined to it."""
        if not text:
            return
        if self._parts and kind is not Kind.NAME and self._parts[-1].kind is kind:
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))
