"""The constraint that makes an output call the tools that ``tool_choice`` requires or allows.

The result is a structural tag in vLLM's form: the model's own format around arguments that follow the tools' schemas.
So the same parser reads forced calls and free ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.compile.bodies import CallRule, Tool
from headrace.text.parsing.formats import ToolFormat, Written


def constraint_for_tools(
    tools: Sequence[Tool], rule: CallRule, written: ToolFormat, *, parallel: bool = True
) -> dict[str, Any] | None:
    """The structural tag that enforces ``rule``; None if there is no constraint.

    ``{"structures": [{"begin", "schema", "end"}], "triggers": […]}``. Required calls, which begin with the first token,
    have ``"required": true`` too, and ``"many"``: whether several calls are allowed. With ``auto`` the output is free
    until a call begins; then it is a call of an allowed tool, and a call of a ``strict`` tool follows its schema.

    Args:
        tools: the tools of the request.
        rule: what its ``tool_choice`` says.
        written: how the model writes calls.
        parallel: whether the output may have several calls.
    """
    held = [(at, tool) for at, tool in enumerate(tools) if rule.allows(tool.function.name)]
    limited = len(held) < len(tools) or any(tool.function.strict for _, tool in held)
    form = written.written
    if rule.mode == "none" or not held or not (rule.forced or (limited and form.trigger)):
        return None
    exact = rule.forced or form.python or form.quote  # these formats have no schema for arbitrary arguments
    structures = [
        _structure(form, at, tool, _schema(tool) if exact or tool.function.strict else _ANY)
        for at, tool in held
    ]
    if not rule.forced:
        return {"structures": structures, "triggers": [form.trigger]}
    return {
        "structures": structures,
        "triggers": [form.before_name],
        "required": True,
        "many": parallel and not rule.one and not form.single,
    }


_ANY: dict[str, Any] = {"type": "object"}


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _structure(form: Written, at: int, tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    name = tool.function.name
    begin = form.before_name + name + form.before_arguments
    made: dict[str, Any] = {"begin": begin, "schema": schema, "end": form.end}
    made |= {"name": name, "path": f"tools[{at}].function.parameters"}
    if form.python:
        made["python"] = True
    if form.quote:
        made["quote"] = form.quote
    return made
