"""Parses one output into a message: what each step adds to it, or the whole message.

It adds to the machine what the API needs: indexes and ids of calls, the limit of one call, and the number of reasoning
tokens.
"""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.text.parsing.calls import Schemas
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat
from headrace.text.parsing.machine import Machine
from headrace.text.parsing.reader import Kind, Part

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
