"""The response object: a request's settings, its status and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.api.errors import ApiError
from headrace.api.generation.call import Call
from headrace.api.generation.usage import cost_of
from headrace.api.responses.items import Stored
from headrace.api.responses.tools.wire import HostedTool
from headrace.api.responses.wire import ResponsesBody
from headrace.core.request import SamplingParams

ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""The final statuses."""

Response = dict[str, Any]


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


def response_of(call: Call, body: ResponsesBody, result: Result) -> Response:
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
        "model": call.model.name,
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
        "input_tokens_details": {
            "cached_tokens": used["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
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
