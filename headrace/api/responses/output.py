"""Output items while they grow: converts the output of each step to items and to the events of a stream.

Reasoning, text and each call are separate items, in the order in which the model writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from headrace.api.compile.call import Call, cost_of
from headrace.api.errors import ApiError
from headrace.api.responses.items import Stored, new_id
from headrace.api.responses.wire import HostedTool, ResponsesBody, Spelling, spelling_of
from headrace.core.request import SamplingParams
from headrace.text.parsing.machine import CallPiece, MessagePiece

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
        shown = deepcopy(part)  # the part's log-probabilities grow before the event is written
        events.append(self._event("response.content_part.added", content_index=0, part=shown))
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


ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""The final statuses."""


ResponseObject = dict[str, Any]


class Result(NamedTuple):
    """The state of a response: ``completed_at`` is a Unix time, ``error`` the reason if it failed."""

    status: str
    output: Sequence[Stored] = ()
    usage: dict[str, Any] | None = None
    completed_at: int | None = None
    error: ApiError | None = None


class Compacted(NamedTuple):
    """A compaction that was made for this response: its item, and the ``usage`` of its own request."""

    item: Stored
    usage: dict[str, Any]


def response_of(call: Call, body: ResponsesBody, result: Result) -> ResponseObject:
    """The response object."""
    cut = {"reason": "max_output_tokens"} if result.status == "incomplete" else None
    error = result.error
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "completed_at": result.completed_at,
        "status": result.status,
        "background": bool(body.background),
        "error": None if error is None else {"code": error.code or "server_error", "message": str(error)},
        "incomplete_details": cut,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": call.model_name,
        "output": list(result.output),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "safety_identifier": None,
        "service_tier": call.service_class,
        "store": body.stored,
        "truncation": body.truncation or "disabled",
        "usage": result.usage,
        "user": body.user,
    } | _settings(body, call.model.defaults.params)


def _settings(body: ResponsesBody, defaults: SamplingParams) -> dict[str, Any]:
    """The request's settings, with their defaults."""
    choice, reasoning = body.tool_choice or "auto", body.reasoning
    form = body.text.format if body.text is not None else None
    shown: dict[str, Any] = {"type": "text"}
    if form is not None:
        shown = {"strict": False, "description": None} if form.type == "json_schema" else {}
        shown |= form.model_dump(by_alias=True, exclude_none=True)
    return {
        "frequency_penalty": _or(body.frequency_penalty, 0.0),
        "presence_penalty": _or(body.presence_penalty, 0.0),
        "temperature": _or(body.temperature, defaults.temperature),
        "top_p": _or(body.top_p, defaults.top_p),
        "top_logprobs": body.top_logprobs or 0,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "text": {"format": shown, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or () if not isinstance(tool, HostedTool)],
    }


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def usage_of(call: Call) -> dict[str, Any]:
    """The usage of a call, in the format of the Responses API."""
    used = call.usage()
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": used["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": used["total_tokens"],
    } | cost_of(used)


def added(used: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The sum of two usages, field by field, with their cost."""
    together = dict(used)
    for name, value in more.items():
        if isinstance(value, Mapping):
            together[name] = added(used.get(name, {}), value)
        elif isinstance(value, int | float):
            together[name] = used.get(name, 0) + value
    return together
