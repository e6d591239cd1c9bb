"""What an answer must look like so that it calls the tools that ``tool_choice`` demands.

The result is a structural tag: text of the model's own format around JSON that follows the tools' schemas. So the same
parser reads forced calls and free ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.serve.parsing.formats import ToolFormat, Written
from headrace.serve.server.tools_wire import NamedChoice, Tool

AnyChoice = str | NamedChoice | None


class NotEnforceable(ValueError):
    """A choice that cannot be enforced; the message says why."""


def constraint_for_tools(
    tools: Sequence[Tool], choice: AnyChoice, written: ToolFormat | None, parallel: bool = True
) -> dict[str, Any] | None:
    """The structural tag that enforces ``choice``; None where the answer is free.

    With ``required`` and with a named function the whole answer is calls. With ``auto`` it is free until a call
    begins, and is constrained from there on if one of the tools is ``strict``.

    Args:
        tools: what may be called.
        choice: ``tool_choice`` of the request.
        written: how the model writes calls.
        parallel: whether the answer may have several calls.

    Raises:
        NotEnforceable: the model's format has no JSON that a schema could constrain.
    """
    offered = [
        tool
        for tool in tools
        if not isinstance(choice, NamedChoice) or tool.function.name == choice.function.name
    ]
    forced = choice == "required" or isinstance(choice, NamedChoice)
    strict = [tool for tool in offered if tool.function.strict]
    if not offered or choice == "none" or not (forced or strict):
        return None
    form = written.written if written is not None else None
    if form is None:
        if forced:
            name = "without a known format" if written is None else f"in the format {written.name}"
            raise NotEnforceable(f"calls {name} cannot be enforced")
        return None
    if forced:
        several = parallel and not isinstance(choice, NamedChoice)
        return {"type": "structural_tag", "format": _forced(form, offered, several)}
    trigger = _common_beginning(form)
    if not trigger:
        return None
    tags = [_tag(form, tool, whole=True) for tool in offered]
    free = {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "at_least_one": False}
    return {"type": "structural_tag", "format": free | {"stop_after_first": not parallel}}


def _forced(form: Written, tools: Sequence[Tool], several: bool) -> dict[str, Any]:
    """Calls from the first token to the last."""
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(form, tool, whole=False) for tool in tools],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    begin, end = form.section
    return {"type": "tag", "begin": begin, "content": calls, "end": end} if begin else calls


def _tag(form: Written, tool: Tool, whole: bool) -> dict[str, Any]:
    """One call; ``whole`` puts what surrounds all calls around it."""
    begin, end = form.section if whole else ("", "")
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    free = whole and not tool.function.strict
    return {
        "type": "tag",
        "begin": begin + form.before_name + tool.function.name + form.before_arguments,
        "content": {"type": "json_schema", "json_schema": {"type": "object"} if free else schema},
        "end": form.end + end,
    }


def _common_beginning(form: Written) -> str:
    """What tells a call from other text; empty where a call is plain JSON."""
    begin = form.section[0] or form.before_name
    return "" if begin.startswith("{") else begin
