"""The text of an output that ends with its first tool call, for requests that allow only one.

It replaces a `text.stream.TextStream`, so that live outputs, shared computations and cached responses end at the same
token.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.text.parsing.formats import ReasoningFormat, ToolFormat
from headrace.text.parsing.machine import Machine
from headrace.text.parsing.typed import Schemas
from headrace.text.stream import AFTER_CALL, TextDelta, TextStream


class FirstCallStream:
    """Ends the text of ``stream`` at the token that completes a call; `TextDelta.stopped` is then `AFTER_CALL`."""

    def __init__(
        self,
        stream: TextStream,
        tools: ToolFormat,
        reasoning: ReasoningFormat | None,
        opened: bool,
        schemas: Schemas,
        limited: bool = False,
    ) -> None:
        self._stream = stream
        self._machine = Machine(tools, reasoning, opened=opened, schemas=schemas, limited=limited)

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """See `TextStream.push`."""
        shown: list[str] = []
        texts: list[str] = []
        offset, stopped = 0, None
        for at, token in enumerate(tokens):
            if self._machine.called:
                stopped = AFTER_CALL
                break
            delta = self._stream.push((token,))
            offset = offset if at else delta.offset
            shown.append(delta.text)
            texts += delta.texts
            stopped = delta.stopped
            if stopped is not None:
                break
            self._machine.push(delta.text)
        if stopped is None and self._machine.called:
            stopped = AFTER_CALL
        return TextDelta("".join(shown), stopped, tuple(texts), offset)

    def finish(self) -> TextDelta:
        """See `TextStream.finish`."""
        return self._stream.finish()
