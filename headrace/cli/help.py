"""``--help`` in groups at the terminal's width, ``--help-all``, and advice for options of other engines.

`Command` is the class of all commands. ``--help`` shows a command's own options and the common ones of the engine's;
``--help-all`` shows all.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from headrace.config import TITLES, ConfigError
from headrace.config.errors import advice
from headrace.config.values import show_duration

CONTEXT = {"help_option_names": ["--help", "-h"]}

COMMON = frozenset(
    (
        *("model", "dtype", "quantization", "max_model_len", "served_model_name", "device"),
        "tensor_parallel_size",
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype"),
        *("enable_lora", "lora_modules", "mm_processor_cache_gb", "embedding_model", "rerank_model"),
        *("profile", "scheduling_policy", "max_num_seqs", "tenants"),
        *("host", "port", "api_key", "api_key_file"),
        *("response_cache", "response_cache_bytes", "semantic_cache", "history_file", "batch_path"),
        *("config", "log_level", "log_format", "tuner"),
        *("speculative_config", "device_price", "peak_flops"),
    )
)
"""Options of the configuration that ``--help`` shows; ``--help-all`` shows the others too."""

ARGUMENTS = "Arguments"
OWN = "Options"
WIDEST = 140
"""Maximum width in columns, for readability on wide terminals."""

_METAVARS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "file": "PATH", "directory": "PATH"}

TEXT_COLUMN = 34
"""Column at which help texts begin; a longer flag has a line of its own."""

NARROW = 70
"""On terminals narrower than this, texts begin at half of `TEXT_COLUMN`."""


class Line(NamedTuple):
    """One parameter as help shows it."""

    name: str
    spelling: str
    text: str
    group: str


NAMES = "--served-model-name"
MODULES = "--lora-modules"
"""The options that take several values after one flag, as in vLLM."""


class Command(TyperCommand):
    """A command with grouped help. For an option of another engine, the error names the alternative."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--help-all" in args:
            typer.echo(help_text(self, ctx, whole=True), nl=False)
            ctx.exit()
        known = {spelling for each in self.params for spelling in (*each.opts, *each.secondary_opts)}
        for word in args:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known and (what := advice(flag)) is not None:
                raise ConfigError(f"there is no option {flag}: {what}")
        try:
            return super().parse_args(ctx, self._each_name_flagged(ctx, _each_module_flagged(args)))
        except Exception as error:
            if (refused := _refusal(error)) is None:
                raise
            raise ConfigError(refused) from None

    def _each_name_flagged(self, ctx: Any, args: list[str]) -> list[str]:
        """``args`` with `NAMES` before each of its values; the last of several is MODEL if none stands elsewhere."""
        if NAMES not in args or not any(NAMES in each.opts for each in self.params):
            return args
        first = args.index(NAMES) + 1
        end = next((at for at in range(first, len(args)) if args[at].startswith("-")), len(args))
        if end - first < 2:
            return args
        others = [*args[: first - 1], *args[end:]]
        model = self.make_parser(ctx).parse_args(others)[0].get("model")
        named_elsewhere = isinstance(model, (str, list, tuple)) and bool(model)
        names = args[first : end if named_elsewhere else end - 1]
        flagged = [word for name in names for word in (NAMES, name)]
        return [*args[: first - 1], *flagged, *args[first + len(names) :]]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx, whole=False))


def _each_module_flagged(args: list[str]) -> list[str]:
    """``args`` with `MODULES` before each of its values, which are NAME=FOLDER or JSON objects."""
    flagged: list[str] = []
    within = False
    for word in args:
        value = not word.startswith("-") and ("=" in word or word.lstrip().startswith("{"))
        if within and value and flagged[-1] != MODULES:
            flagged.append(MODULES)
        flagged.append(word)
        within = word == MODULES or (within and value)
    return flagged


class Group(TyperGroup):
    """A group of commands; each is listed with the first sentence of its help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        columns = _columns()
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        lines = [
            Line(name, name, _first_sentence((command and command.help) or ""), "Commands")
            for name, command in commands.items()
        ]
        formatter.write(_head(self, ctx, columns) + _groups([*lines, *lines_of(self, ctx)], columns))


def help_text(command: Any, ctx: Any, *, whole: bool, width: int | None = None) -> str:
    """A command's help; ``whole`` also shows the options that are rarely needed."""
    columns = _columns(width)
    lines = list(lines_of(command, ctx))
    shown = [line for line in lines if whole or line.name in COMMON or line.group not in TITLES.values()]
    text = _head(command, ctx, columns) + _groups(shown, columns)
    hidden = len(lines) - len(shown)
    return text + (f"\n{hidden} more options: {ctx.command_path} --help-all\n" if hidden else "")


def _columns(width: int | None = None) -> int:
    return min(width or shutil.get_terminal_size().columns, WIDEST)


def _head(command: Any, ctx: Any, columns: int) -> str:
    """Usage and description."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    pieces = [
        f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}",
        *("\n".join(textwrap.wrap(" ".join(each.split()), columns)) for each in paragraphs),
    ]
    return "\n\n".join(pieces) + "\n"


def _groups(lines: Sequence[Line], columns: int) -> str:
    """The groups in order, each with a heading; common options first in each."""
    text = ""
    for group in dict.fromkeys(line.group for line in lines):
        ordered = [line for line in lines if line.group == group]
        ordered.sort(key=lambda line: line.name not in COMMON)
        text += "\n".join(("", f"{group}:", *_rows(ordered, columns), ""))
    return text


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."


_PLAIN = (
    (r"Input should be a valid integer.*", "expected a whole number"),
    (r"Input should be a valid number.*", "expected a number"),
    (r"Input should be a valid boolean.*", "expected true or false"),
    (r"Input should be greater than or equal to (\S+)", r"expected a number of at least \1"),
    (r"Input should be greater than (\S+)", r"expected a number above \1"),
    (r"Input should be less than or equal to (\S+)", r"expected a number of at most \1"),
    (r"Value error, (.*)", r"\1"),
    (r"(expected .*)", r"\1"),
)
"""Messages of the parsing library, and their replacements."""


def _refusal(error: Exception) -> str | None:
    """The plain message for a value that cannot be parsed; None for any other error."""
    option, message = getattr(error, "param", None), getattr(error, "message", None)
    if option is None or not message:
        return None
    for pattern, plain in _PLAIN:
        if re.match(pattern, message):
            return f"{max(option.opts, key=len)}: {re.sub(pattern, plain, message)}"
    return None


def lines_of(command: Any, ctx: Any) -> Iterable[Line]:
    """The arguments and options of a command, its own before those of the configuration."""
    arguments, options = [], []
    for each in command.get_params(ctx):
        if getattr(each, "hidden", False):
            continue
        text = (each.help or "") + (_default(each) if each.show_default else "")
        text = re.sub(r"\.( \(default: .*\))$", r"\1.", text)
        if each.param_type_name == "argument":
            arguments.append(Line(each.name, each.metavar or each.name.upper(), text, ARGUMENTS))
        else:
            group = getattr(each, "rich_help_panel", None) or OWN
            options.append(Line(each.name, _spelling(each, ctx), text, group))
    yield from arguments
    yield from sorted(options, key=lambda line: line.group in TITLES.values())


def _spelling(option: Any, ctx: Any) -> str:
    if option.secondary_opts:
        return f"--[no-]{option.opts[0].removeprefix('--')}"
    spelling = ", ".join(sorted(option.opts, key=len))
    return spelling if option.is_flag else f"{spelling} {_metavar(option, ctx)}"


def _metavar(param: Any, ctx: Any) -> str:
    """The placeholder of a value. Releases of typer differ in the method that makes it."""
    if param.metavar:
        return str(param.metavar)
    make = getattr(param, "display_type", None) or param.make_metavar
    name = re.sub(r"[<>]|list\[|\]| range", "", str(make(ctx)), flags=re.IGNORECASE)
    return _METAVARS.get(name.lower(), name.upper())


def _default(option: Any) -> str:
    value = option.default
    if value is None or callable(value) or value in ((), [], "", False):
        return ""
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    if option.metavar == "DURATION" and isinstance(value, float):
        shown = show_duration(value)
    return f" (default: {shown})"


def _rows(lines: Iterable[Line], columns: int) -> Iterable[str]:
    """Spelling and text in two columns."""
    for line in lines:
        begin = f"  {line.spelling}"
        column = TEXT_COLUMN if columns > NARROW else TEXT_COLUMN // 2
        indent = " " * column
        wrapped = textwrap.wrap(line.text, max(20, columns - column), break_on_hyphens=False) or [""]
        if len(begin) + 2 <= column:
            yield begin.ljust(column) + wrapped[0]
            yield from (indent + rest for rest in wrapped[1:])
        else:
            yield from textwrap.wrap(
                begin.strip(), columns - 2, initial_indent="  ", subsequent_indent=indent
            )
            yield from (indent + rest for rest in wrapped)
