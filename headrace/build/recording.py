"""An engine that is recorded, and the same engine again from its recording.

The first line of a trace holds what `make_engine` was given, so that the two can never differ by a setting that one of
them forgot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from headrace import __version__
from headrace.build.engine import make_engine, make_knobs
from headrace.config import CacheOptions, ConfigError, SchedulerOptions, ServerOptions
from headrace.core.engine import Engine
from headrace.core.ports import Runner
from headrace.observe.recording.engine import Tell
from headrace.observe.recording.moments import Begun
from headrace.observe.recording.tape import Tape
from headrace.observe.recording.wire import plain

SIZES = ("num_blocks", "max_model_len")
"""Numbers that a replay may change beside the options."""


def open_tape(options: ServerOptions) -> Tape | None:
    """The recording that was asked for, if any.

    Raises:
        ConfigError: its file cannot be written.
    """
    if options.record_trace is None:
        return None
    try:
        return Tape(Path(options.record_trace), options.record_trace_bytes)
    except OSError as error:
        raise ConfigError(f"--record-trace {options.record_trace}: {error.strerror}") from None


def make_recorded_engine(
    tell: Tell, plans: SchedulerOptions, cache: CacheOptions, runner: Runner, **rest: Any
) -> Engine:
    """`make_engine`, whose arguments and whose engine's life are told."""
    given = {"plans": plans, "cache": cache} | rest
    hints = get_type_hints(make_engine, include_extras=True)
    settings = {
        name: plain(
            TypeAdapter(hints[name]).dump_python(dict(value) if isinstance(value, Mapping) else value)
        )
        for name, value in given.items()
    }
    tell(Begun(__version__, settings))
    return make_engine(plans, cache, runner, **rest, tell=tell)


def make_engine_again(
    settings: Mapping[str, Any], runner: Runner, changes: Mapping[str, str] | None = None
) -> Engine:
    """The engine of a trace's settings over another runner; ``changes`` are options as text, by their names.

    Raises:
        ConfigError: settings of another Headrace, or a change that no engine knows or that makes no sense.
    """
    given = _read_settings(settings)
    if changes:
        _change(given, changes)
    return make_engine(runner=runner, **given)


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(make_engine, include_extras=True)
    unknown = settings.keys() - hints.keys()
    if unknown:
        raise ConfigError(
            f"the trace has settings that this Headrace does not know: {', '.join(sorted(unknown))}"
        )
    given = {}
    for name, value in settings.items():
        kind = hints[name]
        if is_dataclass(kind) and (more := value.keys() - {each.name for each in fields(kind)}):
            raise ConfigError(
                f"the trace has {name} that this Headrace does not know: {', '.join(sorted(more))}"
            )
        try:
            given[name] = TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"the trace's {name} cannot be read: {error.errors()[0]['msg']}") from None
    return given


def _change(given: dict[str, Any], changes: Mapping[str, str]) -> None:
    """Apply changes in place. What a step may hold follows the options; what was not changed stays as recorded."""
    known = {each.name: part for part in ("plans", "cache") for each in fields(given[part])}
    del known["profile"]  # what it stood for has been recorded option by option
    old_block_size = given["cache"].block_size
    if given["plans"].max_num_batched_tokens is None:
        given["plans"] = replace(given["plans"], max_num_batched_tokens=given["knobs"].batched_tokens)
    for flag, text in changes.items():
        name = flag.replace("-", "_")
        if name in SIZES:
            given[name] = _parsed(flag, int, text)
            continue
        if name not in known:
            raise ConfigError(f"a replay cannot change {flag!r}; it can change {', '.join([*known, *SIZES])}")
        part = given[known[name]]
        kind = get_type_hints(type(part), include_extras=True)[name]
        given[known[name]] = replace(part, **{name: _parsed(flag, kind, text)})
    given["num_blocks"] = given["num_blocks"] * old_block_size // given["cache"].block_size
    given["knobs"] = make_knobs(given["plans"], "cpu", given["max_model_len"])
    if given["plans"].overlap is not None:
        given["overlap"] = given["plans"].overlap


def _parsed(flag: str, kind: Any, text: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        raise ConfigError(f"{flag}={text}: {error.errors()[0]['msg']}") from None
