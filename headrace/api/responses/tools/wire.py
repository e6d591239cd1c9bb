"""Tools in requests of the Responses API: functions, namespaces of functions, and hosted tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from headrace.api.responses.refusals import known_choice, known_tools
from headrace.api.responses.tools.names import Spelling
from headrace.api.tools.wire import MAX_TOOLS, Function, FunctionLabel, mode_or
from headrace.api.wire import FORM_MARK, Wire, wrong_value

MAX_NAME = 128
"""Maximum characters of the name that the model sees, with its namespace."""


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamespaceTool(Wire):
    """Functions under one name; their calls have it in the field ``namespace``."""

    type: Literal["namespace"]
    name: FunctionLabel
    description: str | None = Field(None, description="Accepted; the model sees only the functions'.")
    tools: list[FunctionTool] = Field(max_length=MAX_TOOLS)


class HostedTool(Wire):
    """A tool that OpenAI runs. It is not offered to the model, and the response's ``tools`` do not list it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["web_search", "web_search_preview", "image_generation"]


def _form(value: Any) -> str | None:
    kind = (value.get("type") or "function") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("function", "namespace"):
        return f"{FORM_MARK}{kind}"
    return FORM_MARK + "hosted" if isinstance(kind, str) else None


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag(FORM_MARK + "function")]
    | Annotated[NamespaceTool, Tag(FORM_MARK + "namespace")]
    | Annotated[HostedTool, Tag(FORM_MARK + "hosted")],
    Discriminator(_form, custom_error_type="tool_type", custom_error_message="must be a tool"),
]


def offered(tools: Iterable[ResponseTool]) -> Iterator[tuple[Spelling, FunctionTool]]:
    """The functions that the model may call, with the client's names for them."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield Spelling(tool.name), tool
        elif isinstance(tool, NamespaceTool):
            for each in tool.tools:
                yield Spelling(each.name, tool.name), each


def _different(tools: Sequence[ResponseTool]) -> Sequence[ResponseTool]:
    names = [spelling.flat for spelling, _ in offered(tools)]
    if len(names) > MAX_TOOLS:
        raise wrong_value(f"has {len(names)} functions; at most {MAX_TOOLS} are possible")
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise wrong_value(f"has two functions with the name {twice!r}")
    long = next((name for name in names if len(name) > MAX_NAME), None)
    if long is not None:
        raise wrong_value(
            f"has a function whose name is longer than {MAX_NAME} characters with its namespace"
        )
    return tools


Tools = Annotated[
    list[ResponseTool],
    Field(max_length=MAX_TOOLS),
    AfterValidator(_different),
    BeforeValidator(known_tools),
]


class FunctionChoice(Wire):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Wire):
    """Only these functions may be called; the prompt still shows all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(FORM_MARK + "mode")]
    | Annotated[FunctionChoice, Tag(FORM_MARK + "named")]
    | Annotated[AllowedFunctions, Tag(FORM_MARK + "allowed")],
    mode_or(FunctionChoice, AllowedFunctions),
    BeforeValidator(known_choice),
]


def path_of(tools: Iterable[ResponseTool], number: int) -> str:
    """Where the request has the function that is the ``number``-th of those `offered`."""
    paths: list[str] = []
    for at, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            paths.append(f"tools[{at}]")
        elif isinstance(tool, NamespaceTool):
            paths += [f"tools[{at}].tools[{inner}]" for inner in range(len(tool.tools))]
    return paths[number]
