"""The constraint that makes an output call the tools that ``tool_choice`` requires.

The result is a structural tag in vLLM's form: the model's own format around arguments that follow the tools' schemas.
So the same parser reads forced calls and free ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.serve.http.tools.wire import NamedChoice, Tool
from headrace.serve.parsing.formats import ToolFormat, Written


class NotEnforceable(ValueError):
    """A choice that cannot be enforced; the message says why."""


def constraint_for_tools(
    tools: Sequence[Tool],
    choice: str | NamedChoice | None,
    written: ToolFormat | None,
    *,
    parallel: bool = True,
) -> dict[str, Any] | None:
    """The structural tag that enforces ``choice``; None if there is no constraint.

    ``{"structures": [{"begin", "schema", "end"}], "triggers": […]}``. Required calls, which begin with the first token,
    have ``"required": true`` too, and ``"many"``: whether several calls are allowed. With ``auto`` the output is free
    until a call begins, and a call of a ``strict`` tool follows its schema.

    Args:
        tools: the tools that may be called.
        choice: ``tool_choice`` of the request.
        written: how the model writes calls.
        parallel: whether the output may have several calls.

    Raises:
        NotEnforceable: the model's format of calls is unknown, or does not allow it.
    """
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    forced = choice == "required" or isinstance(choice, NamedChoice)
    if not tools or choice == "none" or not (forced or any(tool.function.strict for tool in tools)):
        return None
    form = written.written if written is not None else None
    if form is None and forced:
        where = "without a known format" if written is None else f"in the format {written.name}"
        raise NotEnforceable(f"calls {where} cannot be enforced")
    if form is None or not (forced or form.trigger):
        return None
    if not forced:
        exact = form.python or form.quote  # these formats have no schema for arbitrary arguments
        free = [
            _structure(form, tool, _schema(tool) if exact or tool.function.strict else _ANY) for tool in tools
        ]
        return {"structures": free, "triggers": [form.trigger]}
    many = parallel and choice == "required" and not form.single
    structures = [_structure(form, tool, _schema(tool)) for tool in tools]
    return {
        "structures": structures,
        "triggers": [form.before_name],
        "required": True,
        "many": many,
    }


_ANY: dict[str, Any] = {"type": "object"}


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _structure(form: Written, tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    begin = form.before_name + tool.function.name + form.before_arguments
    made: dict[str, Any] = {"begin": begin, "schema": schema, "end": form.end}
    if form.python:
        made["python"] = True
    if form.quote:
        made["quote"] = form.quote
    return made
