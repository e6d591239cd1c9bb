"""Output items while they grow: converts the output of each step to items and to the events of a stream.

Reasoning, text and each call are separate items, in the order in which the model writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.api.responses.items import Stored, new_id
from headrace.api.responses.tools.names import Spelling, spelling_of
from headrace.text.parsing.message import CallPiece, MessagePiece

Event = dict[str, Any]
"""An event of a stream, without its number."""

NO_SPELLINGS: Mapping[str, Spelling] = {}

SLICE = 8
"""Characters that are parsed at once. A call is longer, so text before it and after it is never parsed together."""


def slices(text: str) -> Iterator[str]:
    """``text`` in pieces, so that the order of items does not depend on how much text arrived at once."""
    yield text[:SLICE]
    for at in range(SLICE, len(text), SLICE):
        yield text[at : at + SLICE]


def joined(events: list[Event]) -> list[Event]:
    """``events``, with consecutive deltas of the same text merged into one event."""
    rest: list[Event] = []
    for event in events:
        last = rest[-1] if rest else {}
        same = last.get("type") == event["type"] and last.get("item_id") == event.get("item_id")
        if same and "delta" in event:
            last["delta"] += event["delta"]
        else:
            rest.append(event)
    return rest


class Output:
    """The items of one response. One is open at a time; a piece of another kind closes it.

    ``spellings`` has the functions by the names that the model sees.
    """

    def __init__(self, spellings: Mapping[str, Spelling] = NO_SPELLINGS) -> None:
        self._spellings = spellings
        self.items: list[Stored] = []
        self._open: Stored | None = None

    def add(self, piece: MessagePiece) -> list[Event]:
        """The events of what a step adds."""
        events: list[Event] = []
        if piece.reasoning:
            events += self._switch("reasoning")
            events += self._grow("response.reasoning_text.delta", piece.reasoning)
        if piece.content:
            events += self._switch("message")
            events += self._grow("response.output_text.delta", piece.content)
        for call in piece.calls:
            events += self._call(call)
        return events

    def put(self, item: Stored) -> list[Event]:
        """Add a complete item."""
        self.items.append(item)
        place = {"output_index": len(self.items) - 1, "item": item}
        return [{"type": f"response.output_item.{what}", **place} for what in ("added", "done")]

    def score(self, logprobs: list[dict[str, Any]], events: list[Event]) -> None:
        """Add the log-probabilities of a step to its text, in the item and in its event."""
        for event in events:
            if event["type"] == "response.output_text.delta":
                event["logprobs"] = logprobs
                self.items[event["output_index"]]["content"][0]["logprobs"] += logprobs
                return

    def finish(self, status: str) -> list[Event]:
        """Close the last item, by the ``status`` of the response; a response without items gets an empty message."""
        answered = any(item["type"] != "compaction" for item in self.items)
        events = [] if answered else self._switch("message")
        return events + self._close("completed" if status == "completed" else "incomplete")

    def _switch(self, kind: str) -> list[Event]:
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close("completed")
        if kind == "reasoning":
            part: Stored = {"type": "reasoning_text", "text": ""}
            item: Stored = {"type": kind, "id": new_id("rs"), "summary": [], "content": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": new_id("msg"), "role": "assistant", "content": []}
        events += self._begin(item | {"status": "in_progress"})
        events.append(self._event("response.content_part.added", content_index=0, part=dict(part)))
        self.items[-1]["content"].append(part)
        return events

    def _begin(self, item: Stored) -> list[Event]:
        self._open = item
        self.items.append(item)
        shown = item | {"content": []} if "content" in item else dict(item)
        index = len(self.items) - 1
        return [{"type": "response.output_item.added", "output_index": index, "item": shown}]

    def _grow(self, name: str, text: str) -> list[Event]:
        self.items[-1]["content"][0]["text"] += text
        event = self._event(name, content_index=0, delta=text)
        return [event | {"logprobs": []} if name == "response.output_text.delta" else event]

    def _call(self, call: CallPiece) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            events = self._close("completed")
            item: Stored = {
                "type": "function_call",
                "id": new_id("fc"),
                "call_id": call.id,
                **spelling_of(call.name, self._spellings).fields(),
            }
            events += self._begin(item | {"arguments": "", "status": "in_progress"})
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        index = len(self.items) - 1
        done: Event = {"type": "response.output_item.done", "output_index": index, "item": item}
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            return [self._event("response.function_call_arguments.done", **whole), done]
        part = item["content"][0]
        text_done = self._event("response.reasoning_text.done", content_index=0, text=part["text"])
        if item["type"] == "message":
            text_done |= {"type": "response.output_text.done", "logprobs": part["logprobs"]}
        return [text_done, self._event("response.content_part.done", content_index=0, part=part), done]

    def _event(self, kind: str, /, **more: Any) -> Event:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[index]["id"], "output_index": index} | more
