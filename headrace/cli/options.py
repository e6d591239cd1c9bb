"""Command-line flags made from dataclasses: the parts of `headrace.config`, and groups of flags that commands share."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from headrace.config import PARTS, TITLES, ConfigError, Options, options
from headrace.config.errors import suggestion
from headrace.config.values import parse_duration, plain_type, show_value, unit_of

_TITLES = {kind: TITLES[part] for part, kind in PARTS.items()}
_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT"}
_UNIT_METAVARS = {"bytes": "SIZE", "seconds": "DURATION"}

CONFIG = Annotated[Path | None, typer.Option("--config", help="YAML file of options.", show_default=False)]


def with_options(
    *parts: type, several: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the flags of ``parts`` and ``--config`` to a command, which receives them merged as ``given: Options``.

    ``model`` becomes an argument, all others flags. Flags in ``several`` are repeatable; the command then receives
    ``given: Sequence[Options]``, one for each combination. ``only`` names the options that become flags (None: all of
    ``parts``). Without ``parts`` there is neither ``given`` nor ``--config``. A parameter whose type is a dataclass
    stands for its fields, which are annotated for typer.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = {p.name: p for p in inspect.signature(command, eval_str=True).parameters.values()}
        own.pop("given", None)
        flags = [
            _flag(each, kind, each.name in several)
            for kind in parts
            for each in fields(kind)
            if only is None or each.name in only
        ]
        config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=CONFIG)

        def run(**values: Any) -> None:
            rest = {name: _value(each.annotation, name, values) for name, each in own.items()}
            if not parts:
                command(**rest)
                return
            given = {
                flag.name: values[flag.name] for flag in flags if values[flag.name] not in (None, [], ())
            }
            merged = _combinations(given, several, values["config"])
            command(given=merged if several else merged[0], **rest)

        kept = [flag for each in own.values() for flag in _parameters(each)]
        signature = inspect.Signature([*flags, *kept, *([config] if parts else [])])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameters(each: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """A parameter of a command as flags: itself, or the fields of its dataclass."""
    kind = each.annotation
    if not is_dataclass(kind):
        yield each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = _hints(kind)  # type: ignore[arg-type]
    for one in fields(kind):
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        annotation = hints[one.name]
        yield from _parameters(
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )


def _value(kind: Any, name: str, values: Mapping[str, Any]) -> Any:
    """The value of a command's parameter: of its flag, or a dataclass of the values of its fields' flags."""
    if not is_dataclass(kind):
        return values[name]
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{each.name: _value(hints[each.name], each.name, values) for each in fields(kind)})  # type: ignore[operator]


def _combinations(given: Mapping[str, Any], several: Collection[str], file: Path | None) -> Sequence[Options]:
    repeated = {name: given[name] for name in several if name in given}
    return [
        options({**given, **dict(zip(repeated, values, strict=True))}, file)
        for values in itertools.product(*repeated.values())
    ]


def _flag(each: Field[Any], part: type, repeatable: bool) -> inspect.Parameter:
    kind, info = get_args(_hints(part)[each.name])
    assert isinstance(info, FieldInfo)
    text = info.description or ""
    if repeatable and each.name == "model":
        text = text.rstrip(".") + ". Several: one server of all of them."
    elif repeatable:
        text = text.rstrip(".") + ". Repeatable: the results are compared."
    if each.default is not MISSING and each.default not in (None, ()):
        text = f"{text.rstrip('.')} (default: {_shown(info, each.default)})."
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            _parsed_type(plain_type(kind), repeatable), _mark(each.name, part, kind, info, text)
        ],
    )


def _mark(name: str, part: type, kind: Any, info: FieldInfo, text: str) -> Any:
    """typer's description of a parameter."""
    if name == "model":
        return typer.Argument(help=text, show_default=False, metavar="MODEL")
    flag = "--" + name.replace("_", "-")
    panel = _TITLES[part]
    if plain_type(kind) is bool:
        return typer.Option(f"{flag}/--no-{flag[2:]}", help=text, rich_help_panel=panel, show_default=False)
    metavar = _metavar(plain_type(kind), unit_of(info))
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False, metavar=metavar)


def _metavar(kind: Any, unit: str) -> str:
    if get_origin(kind) is Literal:
        return f"[{'|'.join(map(str, get_args(kind)))}]"
    return _UNIT_METAVARS.get(unit) or _METAVARS.get(kind, "TEXT")


@cache
def _hints(part: type) -> dict[str, Any]:
    """The annotations of a part; cached, since evaluating them takes milliseconds."""
    return get_type_hints(part, include_extras=True)


def _shown(info: FieldInfo, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return show_value(info, value)


def _parsed_type(kind: Any, repeatable: bool) -> Any:
    """The type that typer parses: all but switches are text, since the configuration parses units and validates."""
    if get_origin(kind) is tuple or repeatable:
        return list[str] | None
    return bool | None if kind is bool else str | None


def duration(value: object) -> float:
    """Parses a duration such as ``500ms``, ``30s`` or a plain number into seconds.

    Raises:
        typer.BadParameter: the text is not a duration, or negative or infinite.
    """
    try:
        seconds = parse_duration(str(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not 0 <= seconds < math.inf:
        raise typer.BadParameter(f"expected a finite duration of at least 0, got {value}")
    return seconds


def one_of(flag: str, value: str, known: Collection[str]) -> str:
    """Checks a value against the ``known`` choices of a flag.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in known:
        raise ConfigError(f"{flag} {value}: expected one of {', '.join(known)}{suggestion(value, known)}")
    return value
