"""Finds the section of a rendered prompt that a token belongs to: the tools, a message, or the opening of the answer.

It searches the chat template's output for the texts of the messages, in order. So it works with every template, and
costs nothing until a place is requested.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from headrace.api.compile.bodies import Conversation, Message
from headrace.api.compile.draft import Applied
from headrace.api.compile.markers import marker_at
from headrace.api.compile.normalization import described, header
from headrace.api.compile.policies import About
from headrace.core.memory.departure import Place
from headrace.text.parsing.formats import ReasoningFormat
from headrace.text.tokenizer import Tokenizer

EXCERPT = 48
"""Characters on each side of a position that an explanation may show."""


class Section(NamedTuple):
    """A part of the text, ``[start, end)``. ``number`` is the index of its message (None: no message), ``words`` are
    the ranges of the message's own text in it.
    """

    name: str
    start: int
    end: int
    number: int | None = None
    words: tuple[tuple[int, int], ...] = ()


class Outline:
    """The sections of a rendered prompt. ``reasoning`` is how the model writes reasoning, if it does."""

    def __init__(
        self, text: str, body: Conversation, reasoning: ReasoningFormat | None, tokenizer: Tokenizer
    ) -> None:
        self._text = text
        self._body = body
        self._reasoning = reasoning
        self._tokenizer = tokenizer

    def about(self, tokens: Sequence[int], done: Sequence[Applied]) -> About:
        """The description of the prompt for its explanation; ``done`` is its normalization. Places are found only on
        demand.
        """
        tools = (crc32(json.dumps(tool.plain(), sort_keys=True).encode()) for tool in self._body.tools or ())
        return About(
            lambda at: self.place(tokens, at),
            tuple(tools),
            tuple(described(done)),
            tuple(header(done).items()),
            not self._tokenizer.is_short(len(self._text)),
        )

    def place(self, tokens: Sequence[int], at: int) -> Place:
        """The place of the token ``at`` of ``tokens``, which are the tokens of the text or of its end."""
        where = self._character(tokens, at)
        if where is None:
            return Place("prompt")
        text = self._text
        section = next(
            (each for each in self.sections() if where < each.end),
            Section("answer", len(text), len(text)),
        )
        before, after = text[max(0, where - EXCERPT) : where], text[where : where + EXCERPT]
        message = None if section.number is None else self._body.messages[section.number]
        return Place(
            section.name,
            "" if message is None else message.role,
            self._marker(section, where),
            message is not None and message.role == "assistant" and self._lacks_reasoning(section),
            where == section.start,
            len(self._tokenizer.encode(text[where : section.end], add_special_tokens=False)),
            before,
            after,
        )

    def sections(self) -> list[Section]:
        """The tools and the messages, in the order of the text."""
        found, at = list[Section](), 0
        for number, message in enumerate(self._body.messages):
            name = "system" if message.role in ("system", "developer") else f"messages[{number}]"
            begin, words = at, []
            for needle in _needles(message):
                place = self._text.find(needle, at)
                if place >= 0:
                    at = place + len(needle)
                    words.append((place, at))
            if words:
                found.append(Section(name, begin, at, number, tuple(words)))
        return sorted([*found, *self._tools()], key=lambda section: section.end)

    def _marker(self, section: Section, where: int) -> str:
        for start, end in section.words:
            if start <= where <= end:
                return marker_at(self._text[start:end], where - start)
        return ""

    def _tools(self) -> list[Section]:
        at, begin = 0, None
        for tool in self._body.tools or ():
            place = self._text.find(json.dumps(tool.function.name), at)
            if place < 0:
                return []
            begin = place if begin is None else begin
            at = place + len(tool.function.name)
            about = tool.function.description
            if about and (end := self._text.find(about.split("\n")[0], at)) >= 0:
                at = end + len(about)
            at = max(at, self._text.find("}}", at))
        return [] if begin is None else [Section("tools", begin, at)]

    def _character(self, tokens: Sequence[int], at: int) -> int | None:
        """The index in the text where the token begins. A character of several tokens begins at the first of them."""
        decode = self._tokenizer.decode
        for start in range(at, max(at - 4, min(at, 1) - 1), -1):
            head = decode(list(tokens[:start]), skip_special_tokens=False)
            if self._text.startswith(head):
                return len(head)
            tail = decode(list(tokens[start:]), skip_special_tokens=False)
            if self._text.endswith(tail):
                return len(self._text) - len(tail)
        return None

    def _lacks_reasoning(self, section: Section) -> bool:
        if self._reasoning is None:
            return False
        text = self._text[section.start : section.end]
        return not any(marker in text for marker in (*self._reasoning.begin, *self._reasoning.end))


def _needles(message: Message) -> list[str]:
    """The texts of a message to search for: trimmed, as templates do, and the names of its calls."""
    content = message.content
    texts = [content] if isinstance(content, str) else [part.text for part in content or ()]
    calls = [call.function.name for call in message.tool_calls or ()]
    return [text.strip() for text in (*texts, *calls) if text.strip()]
