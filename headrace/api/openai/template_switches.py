"""Chat template variables that a request sets: ``chat_template_kwargs``, and the switches of ``reasoning_effort``."""

from __future__ import annotations

from typing import Any

from headrace.api.compile.bodies import Conversation
from headrace.api.compile.model import Dialect
from headrace.api.errors import invalid, not_supported

RESERVED = ("self", "messages", "template", "add_generation_prompt", "continue_final_message")
"""Variables that a request cannot set: they have their own fields, or belong to jinja2."""

SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch reasoning on or off; the name depends on the model family."""


def template_variables(dialect: Dialect, body: Conversation) -> dict[str, Any]:
    """The variables for the template; ``chat_template_kwargs`` takes precedence over ``reasoning_effort``.

    Raises:
        ApiError: a variable has its own field, or the template has no switch for reasoning.
    """
    given = body.chat_template_kwargs or {}
    for name in given:
        if name in RESERVED:
            raise invalid(f"chat_template_kwargs must not have the key {name!r}", "chat_template_kwargs")
        if name == "tools":
            raise invalid(
                "chat_template_kwargs must not have the key 'tools'; it is a field", "chat_template_kwargs"
            )
        if name == "documents":
            raise not_supported("chat_template_kwargs", f"The template variable {name!r}")
    return _effort(dialect, body) | given


def _effort(dialect: Dialect, body: Conversation) -> dict[str, Any]:
    effort = body.reasoning_effort
    if effort is None:
        return {}
    known = dialect.variables(body.chat_template)
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in known else {}
    variables |= {name: effort != "none" for name in SWITCHES if name in known}
    if not variables and effort != "none":
        raise invalid(
            "reasoning_effort: the chat template of this model has no switch for reasoning",
            "reasoning_effort",
            "unsupported_parameter",
        )
    return variables
