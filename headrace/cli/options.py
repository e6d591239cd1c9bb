"""Command-line flags made from the parts of `headrace.config`, so that each option is named in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from headrace.config import options


def with_options(*parts: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of ``parts`` and ``--config``; it receives them merged as ``given: Options``.

    The command's own parameters keep their places. ``model`` becomes an argument; all others are flags.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        flags = [each for kind in parts for each in _parameters(kind)]
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option("--config", help="YAML file of options", rich_help_panel="Options")
            ],
        )

        def run(**values: Any) -> None:
            rest = {name: values[name] for name in own if name != "given"}
            given = {
                flag.name: values[flag.name] for flag in flags if values[flag.name] not in (None, [], ())
            }
            command(given=options(given, values["config"]), **rest)

        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.items() if name != "given"]
        signature = inspect.Signature([*flags, *kept, config])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


@cache
def _parameters(part: type) -> list[inspect.Parameter]:
    """The flags of one part, made once for all commands that take it."""
    hints = get_type_hints(part, include_extras=True)
    return [_parameter(each, part, hints[each.name]) for each in fields(part)]


def _parameter(each: Field[Any], part: type, hint: Any) -> inspect.Parameter:
    kind, info = get_args(hint)
    assert isinstance(info, FieldInfo)
    default = each.default if each.default is not MISSING else None
    shown = "" if default in (None, ()) else f" (default: {default})"
    help_text = f"{info.description}{shown}"
    panel = part.__name__.removesuffix("Options") + " options"
    if each.name == "model":
        mark: Any = typer.Argument(help=help_text, show_default=False)
    else:
        flag = "--" + each.name.replace("_", "-")
        if kind is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        mark = typer.Option(flag, help=help_text, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_optional(kind), mark],
    )


def _optional(kind: Any) -> Any:
    """The type that typer parses: a list for a tuple, None when not given."""
    if get_origin(kind) is tuple:
        return list[str] | None
    if get_origin(kind) in (Union, UnionType):
        return kind
    return kind | None
