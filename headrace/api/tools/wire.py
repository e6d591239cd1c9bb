"""Tools and tool calls in requests."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, SkipValidation, Tag

from headrace.api.wire import FORM_MARK, Answered, Wire, wrong_type, wrong_value

MAX_TOOLS = 128
MAX_ARGUMENT_CHARACTERS = 1_000_000
_NAME = re.compile("[a-zA-Z0-9_-]{1,128}")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise wrong_value("must be 1 to 128 letters, digits, underscores or hyphens")
    return value


def check_parameters(value: Any) -> Any:
    """The schema of the arguments: of type object, or None for no arguments."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("a JSON schema of type object")
    if value.get("type", "object") != "object":
        raise wrong_value(f"must be a JSON schema of type object, got type {value['type']!r}"[:200])
    properties = value.get("properties", {})
    if not isinstance(properties, dict):
        raise wrong_value("has properties that are no object")
    for name, schema in properties.items():
        if not isinstance(schema, dict | bool):
            raise wrong_value(f"has the property {name!r}, whose schema is no object"[:200])
    required = value.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong_value("has a field required that is no list of names")
    return value


FunctionLabel = Annotated[str, AfterValidator(_name)]


class Function(Wire):
    """A function that the model may call."""

    name: FunctionLabel
    description: str | None = None
    parameters: Annotated[SkipValidation[dict[str, Any] | None], BeforeValidator(check_parameters)] = Field(
        None, description="A JSON schema of type object."
    )
    strict: bool | None = Field(None, description="Arguments must follow the schema.")


class Tool(Wire):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(Wire):
    """Names a function."""

    name: str


class NamedChoice(Wire):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Wire):
    """The functions that may be called, of those in ``tools``."""

    mode: Literal["auto", "required"]
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(Wire):
    """Only some of the tools may be called; the prompt still shows all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def mode_or(named: type[Wire], allowed: type[Wire]) -> Discriminator:
    """Distinguishes a choice that is a mode (a string), that names a function, or that allows some of them."""

    def form(value: Any) -> str | None:
        if isinstance(value, str):
            return FORM_MARK + "mode"
        if isinstance(value, allowed) or (isinstance(value, dict) and value.get("type") == "allowed_tools"):
            return FORM_MARK + "allowed"
        return FORM_MARK + "named" if isinstance(value, dict | named) else None

    message = "must be a string or an object that names a function"
    return Discriminator(form, custom_error_type="choice_type", custom_error_message=message)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(FORM_MARK + "mode")]
    | Annotated[NamedChoice, Tag(FORM_MARK + "named")]
    | Annotated[AllowedChoice, Tag(FORM_MARK + "allowed")],
    mode_or(NamedChoice, AllowedChoice),
]


class CallRule(NamedTuple):
    """What a choice says about calls: whether there may or must be any (``mode``), and of which functions.

    ``names`` is None if all may be called. ``one``: the call is that of a named function.
    """

    mode: str
    names: frozenset[str] | None = None
    one: bool = False

    @property
    def forced(self) -> bool:
        """Whether the output must be a call."""
        return self.mode == "required"

    def allows(self, name: str) -> bool:
        """Whether this function may be called."""
        return self.names is None or name in self.names


def call_rule(choice: str | NamedChoice | AllowedChoice | None) -> CallRule:
    """The rule of a ``tool_choice``."""
    if isinstance(choice, NamedChoice):
        return CallRule("required", frozenset({choice.function.name}), one=True)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return CallRule(allowed.mode, frozenset(tool.function.name for tool in allowed.tools))
    return CallRule(choice or "auto")


class CalledFunction(Answered):
    """A function and the arguments that it was called with, as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]


class CalledTool(Answered):
    """A call in an earlier message of the assistant."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Accepted because streams have it. No effect.")


def _different(tools: list[Tool] | None) -> list[Tool] | None:
    names = [tool.function.name for tool in tools or ()]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise wrong_value(f"has two functions with the name {twice!r}")
    return tools


Tools = Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS), AfterValidator(_different)]
