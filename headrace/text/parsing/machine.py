"""The state machine that parses an output: it takes text in pieces of any size, and returns parts.

    text ──marker──> reasoning ──end──> text ──opening──> calls ──end or failure──> text

The parts depend only on the text, not on how it is split. The machine holds back text that may become a marker or a
call, and white space next to them. It never raises: text that is neither reasoning nor a call is content.

`MessageReader` makes a message of the parts: what each step adds to it, or the whole message. It adds what the API
needs: indexes and ids of calls, the limit of one call, and the number of reasoning tokens.
"""

from __future__ import annotations

import re
import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.text.parsing.calls import JsonCalls, Schemas, XmlCall
from headrace.text.parsing.formats import Arguments, Opening, ReasoningFormat, ToolFormat
from headrace.text.parsing.python_calls import NamedCall, PythonCalls
from headrace.text.parsing.reader import Either, Kind, Part, Progress, Reader, held_from


class _Before(Enum):
    """The kind of the latest part; it decides whether white space is kept."""

    NOTHING = auto()
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class Machine:
    """Parses one output.

    Args:
        tools: the format of calls; None: calls are not parsed.
        reasoning: the format of reasoning; None: reasoning is not parsed.
        opened: whether the prompt has opened the reasoning.
        schemas: the schemas of the arguments of the functions that may be called.
        limited: whether only their calls are read, whatever the opening.

    Attributes:
        spans: the ranges of the reasoning in the text, in characters, markers included; the last end is None while the
            reasoning continues.
        called: whether the arguments of a call are complete.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        opened: bool = False,
        schemas: Schemas | None = None,
        limited: bool = False,
    ) -> None:
        self.spans: list[tuple[int, int | None]] = []
        self.called = False
        self._openings = tools.openings if tools else ()
        self._thinking = reasoning
        self._schemas = schemas or {}
        self._limited = limited
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
        self._gap = ""  # white space that has been read; the next part decides whether it is kept
        self._before = _Before.NOTHING
        self._has_content = False
        self._reasoning = False
        self._fresh = True  # whether the current reasoning has reported nothing yet
        self._reader: Reader | None = None
        self._marker = ""  # before the reader's calls
        self._following: tuple[str, ...] = ()  # markers that may follow the reader's calls
        self._ends: tuple[str, ...] = ()  # the same, once the calls have ended
        self._parts: list[Part] = []
        if opened and reasoning is not None:
            self._begin_reasoning(0)

    def push(self, text: str) -> list[Part]:
        """Read more of the output; return the parts that are certain now."""
        return self._read(text, final=False)

    def finish(self) -> list[Part]:
        """End the output; return the parts that were held back."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> list[Part]:
        self._parts = []
        self._pushed += len(text)
        self._held += text
        while self._step(final):
            pass
        return self._parts

    def _step(self, final: bool) -> bool:
        """Advance by one step; False if more text is needed first."""
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
        """Read reasoning or calls that are recognized only at the beginning."""
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
            self._add_content(self._held[:sure])
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
        self._add_content(self._held[: found.start()])
        self._held = self._held[found.start() :]
        if marker not in self._silent:
            self._begin_reasoning(self._offset())
        self._held = self._held[len(marker) :]
        return True

    def _add_content(self, text: str) -> None:
        """Add content. White space at its end is held back if a call may follow."""
        bare = text.rstrip() if self._pattern is not None or self._at_first else text
        if bare:
            content = self._gap + bare
            self._gap = ""
            if self._before is _Before.REASONING or (self._before is _Before.CALL and not self._has_content):
                content = content.lstrip()
            if content:
                separate = self._before is _Before.REASONING and self._has_content
                self._add(Kind.CONTENT, "\n" + content if separate else content)
                self._before, self._has_content = _Before.TEXT, True
        self._gap += text[len(bare) :]

    def _end_text(self) -> None:
        if self._before in (_Before.TEXT, _Before.NOTHING):
            self._add(Kind.CONTENT, self._gap)
        self._gap = ""

    def _offset(self) -> int:
        """The index in the output where `_held` begins."""
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
            self._add_reasoning(self._held[:sure])
            self._held = self._held[sure:]
            return False
        at, end = min(found)
        self._add_reasoning(self._held[:at])
        self._held = self._held[at + len(end) :]
        self.spans[-1] = (self.spans[-1][0], self._offset())
        self._reasoning, self._gap, self._before = False, "", _Before.REASONING
        return True

    def _add_reasoning(self, text: str) -> None:
        """Add reasoning, without white space at its beginning and end."""
        bare = text.rstrip()
        if bare and self._fresh:
            separate = len(self.spans) > 1
            self._add(Kind.REASONING, "\n" + bare.lstrip() if separate else bare.lstrip())
            self._fresh = False
        elif bare:
            self._add(Kind.REASONING, self._gap + bare)
        if bare:
            self._gap = ""
        if not self._fresh:
            self._gap += text[len(bare) :]

    # calls

    def _open(self, opening: Opening, start: int, end: int) -> None:
        """Read calls from ``end`` on; text before the marker at ``start`` is content."""
        self._add_content(self._held[:start])
        self._marker, self._held = self._held[start:end], self._held[end:]
        self._following = opening.end
        self._reader = self._choose(opening)

    def _choose(self, opening: Opening) -> Reader:
        known = frozenset(self._schemas) if opening.known or self._limited else None
        if opening.arguments is Arguments.PYTHON:
            return PythonCalls(known, listed=opening.first == "[")
        if opening.header is None:
            return JsonCalls(known, opening.key)
        named: Reader
        if opening.elements is not None:
            named = XmlCall(opening.header, opening.elements, self._schemas, known)
        else:
            named = NamedCall(opening.header, opening.quotes, known)
        return Either(JsonCalls(known, opening.key), named) if opening.objects else named

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
            self._add_content(self._marker)
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
        if any(end.startswith(text) for end in self._ends):
            if final:  # truncated inside the marker
                self._held = ""
            return False
        self._ends = ()
        return True

    def _add(self, kind: Kind, text: str) -> None:
        """Add a part; consecutive parts of one kind are merged."""
        if not text:
            return
        if self._parts and kind is not Kind.NAME and self._parts[-1].kind is kind:
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))


SHORT_ID = 9


@dataclass(slots=True)
class CallPiece:
    """What a step adds to a call; ``id`` and ``name`` are set only at its beginning."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessagePiece:
    """What a step adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of one request are parsed.

    Attributes:
        tools: the format of calls; None: calls are not parsed.
        reasoning: the format of reasoning; None: reasoning is not parsed.
        opened: whether the prompt has opened the reasoning.
        schemas: the schemas of the arguments of the functions that may be called.
        limited: whether only calls of these functions are read, also after a marker; others are text.
        forced: whether a grammar makes every output a call. Then there is no content: what is neither reasoning nor a
            call is the beginning or the end of a call that was cut off.
        parallel: whether an output may have several calls; if not, all after the first are dropped.
        show_reasoning: whether the reasoning is part of the message.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    opened: bool = False
    schemas: Schemas = field(default_factory=dict)
    limited: bool = False
    forced: bool = False
    parallel: bool = True
    show_reasoning: bool = True

    def open(self) -> MessageReader:
        """A reader for one output."""
        return MessageReader(self)

    def markers(self) -> frozenset[str]:
        """The texts that the parser needs, also if they are special tokens."""
        found: frozenset[str] = frozenset()
        for each in (self.tools, self.reasoning):
            found |= each.markers() if each is not None else frozenset()
        return found


class MessageReader:
    """Parses one output. ``calls`` counts its tool calls so far."""

    def __init__(self, reading: Reading, make_id: Callable[[bool], str] | None = None) -> None:
        self.calls = 0
        self._reading = reading
        self._machine = Machine(
            reading.tools,
            reading.reasoning,
            opened=reading.opened,
            schemas=reading.schemas,
            limited=reading.limited,
        )
        self._make_id = make_id or new_id
        self._starts: list[int] = []  # where each token begins, in characters of the output
        self._length = 0

    def push(self, text: str, texts: Sequence[str] = ()) -> MessagePiece:
        """What ``text`` adds; ``texts`` are the texts of the tokens, which may be ahead of ``text``."""
        self._measure(texts)
        return self._piece(self._machine.push(text))

    def finish(self) -> MessagePiece:
        """The text that was held back until the end."""
        return self._piece(self._machine.finish())

    def push_in_order(self, text: str, texts: Sequence[str] = ()) -> list[MessagePiece]:
        """Like `push`, in pieces of one kind each, in the order in which the model wrote them."""
        self._measure(texts)
        return self._in_order(self._machine.push(text))

    def finish_in_order(self) -> list[MessagePiece]:
        """Like `finish`, in pieces of one kind each."""
        return self._in_order(self._machine.finish())

    def _in_order(self, parts: Sequence[Part]) -> list[MessagePiece]:
        return [piece for part in parts if (piece := self._piece([part]))]

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning, markers included."""
        starts = self._starts
        return sum(
            (len(starts) if end is None else bisect_left(starts, end)) - bisect_left(starts, start)
            for start, end in self._machine.spans
        )

    def _measure(self, texts: Sequence[str]) -> None:
        if self._reading.reasoning is not None:
            for each in texts:
                self._starts.append(self._length)
                self._length += len(each)

    def _piece(self, parts: Sequence[Part]) -> MessagePiece:
        piece = MessagePiece()
        for kind, text in parts:
            if kind is Kind.CONTENT:
                if not self._reading.forced:
                    piece.content += text
            elif kind is Kind.REASONING:
                if self._reading.show_reasoning:
                    piece.reasoning += text
            elif kind is Kind.NAME:
                self.calls += 1
                if self._shown():
                    short = self._reading.tools is not None and self._reading.tools.short_ids
                    piece.calls.append(CallPiece(self.calls - 1, self._make_id(short), text))
            elif self._shown():
                self._arguments(piece, text)
        return piece

    def _shown(self) -> bool:
        return self._reading.parallel or self.calls == 1

    def _arguments(self, piece: MessagePiece, text: str) -> None:
        if not piece.calls or piece.calls[-1].index != self.calls - 1:
            piece.calls.append(CallPiece(self.calls - 1))
        piece.calls[-1].arguments += text


def new_id(short: bool) -> str:
    """A new id for a call. A cached response gets new ids each time it is served."""
    if short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID))
    return f"call_{secrets.token_hex(12)}"
