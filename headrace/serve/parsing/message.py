"""One answer as a message: what a step adds to it, and the whole of it.

Joins the machine with what is the API's: indexes and ids of calls, ``tool_choice``, and how many tokens were reasoning.
"""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.serve.parsing.formats import ReasoningFormat, ToolFormat
from headrace.serve.parsing.machine import Machine
from headrace.serve.parsing.parts import Kind, Part
from headrace.serve.parsing.typed import Schemas

SHORT_ID = 9


@dataclass(slots=True)
class CallPiece:
    """What a step adds to a call; ``id`` and ``name`` only where it begins."""

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
    """How the answers to one request are read.

    Attributes:
        tools: how calls are written; None where there are none to be read.
        reasoning: how reasoning is written.
        opened: whether the prompt has opened the reasoning.
        schemas: of the arguments of the functions that may be called.
        parallel: whether an answer may have several calls; if not, all after the first are left out.
        show_reasoning: whether the reasoning is part of the message.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    opened: bool = False
    schemas: Schemas = field(default_factory=dict)
    parallel: bool = True
    show_reasoning: bool = True

    def open(self) -> MessageReader:
        """A reader for one answer."""
        return MessageReader(self)

    def markers(self) -> frozenset[str]:
        """The texts that must be seen, also where they are special tokens."""
        found: frozenset[str] = frozenset()
        for each in (self.tools, self.reasoning):
            found |= each.markers() if each is not None else frozenset()
        return found


class MessageReader:
    """Reads one answer. ``calls`` counts its tool calls so far."""

    def __init__(self, reading: Reading, make_id: Callable[[bool], str] | None = None) -> None:
        self.calls = 0
        self._reading = reading
        self._machine = Machine(
            reading.tools, reading.reasoning, opened=reading.opened, schemas=reading.schemas
        )
        self._make_id = make_id or new_id
        self._starts: list[int] = []  # of the tokens, in characters of the answer
        self._length = 0

    def push(self, text: str, texts: Sequence[str] = ()) -> MessagePiece:
        """What ``text`` adds; ``texts`` are the tokens' own, of which it may lag behind."""
        self._measure(texts)
        return self._piece(self._machine.push(text))

    def finish(self) -> MessagePiece:
        """What was held back until the end."""
        return self._piece(self._machine.finish())

    def push_in_order(self, text: str, texts: Sequence[str] = ()) -> list[MessagePiece]:
        """As `push`, in pieces of one kind each, in the order in which the model wrote them."""
        self._measure(texts)
        return self._in_order(self._machine.push(text))

    def finish_in_order(self) -> list[MessagePiece]:
        """As `finish`, in pieces of one kind each."""
        return self._in_order(self._machine.finish())

    def _in_order(self, parts: Sequence[Part]) -> list[MessagePiece]:
        return [piece for part in parts if (piece := self._piece([part]))]

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens belong to the reasoning, its markers included."""
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
    """A new id for a call. A cached response gets new ones each time that it is served."""
    if short:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID))
    return f"call_{secrets.token_hex(12)}"
