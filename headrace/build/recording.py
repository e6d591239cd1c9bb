"""An engine that is recorded, and the same engine again from its recording.

The first line of a trace holds what `make_engine` was given, so that the two can never differ by a setting that one of
them forgot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from headrace import __version__
from headrace.build.engine import make_engine, make_knobs
from headrace.config import CacheOptions, ConfigError, SchedulerOptions, ServerOptions
from headrace.core.engine import Engine
from headrace.core.ports import Grammars, Runner
from headrace.observe.recording.engine import Tell
from headrace.observe.recording.moments import Begun
from headrace.observe.recording.tape import Tape
from headrace.observe.recording.wire import plain

SIZES = {"num_blocks": Annotated[int, Field(ge=1)], "max_model_len": Annotated[int, Field(ge=2)]}
"""Numbers that a replay may change beside the options."""

SPENT = (
    *("profile", "tenants", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    *("kv_offload_bytes", "kv_offload_path", "kv_offload_disk_bytes"),
)
"""Options of which nothing is left once the engine is made: what came of them was recorded in other settings."""


def open_tape(options: ServerOptions) -> Tape | None:
    """The recording that was asked for, if any.

    Raises:
        ConfigError: its file cannot be written.
    """
    if options.record_trace is None:
        return None
    try:
        return Tape(Path(options.record_trace), options.record_trace_bytes)
    except BlockingIOError:
        raise ConfigError(f"--record-trace {options.record_trace}: another server writes to it") from None
    except OSError as error:
        raise ConfigError(f"--record-trace {options.record_trace}: {error.strerror}") from None


def make_recorded_engine(
    tell: Tell,
    plans: SchedulerOptions,
    cache: CacheOptions,
    runner: Runner,
    *,
    grammars: Grammars | None = None,
    **rest: Any,
) -> Engine:
    """`make_engine`, whose arguments and whose engine's life are told.

    ``grammars`` stay outside: how long a compilation takes is not in a trace, so no request waits for one here. The
    runner compiles what is missing itself.
    """
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
    if not isinstance(settings, Mapping) or not {"plans", "cache"} <= settings.keys():
        raise ConfigError("the trace does not begin with an engine's settings")
    unknown = settings.keys() - hints.keys()
    if unknown:
        raise ConfigError(
            f"the trace has settings that this Headrace does not know: {', '.join(sorted(unknown))}"
        )
    given = {}
    for name, value in settings.items():
        kind = hints[name]
        told = value.keys() if isinstance(value, Mapping) else set()
        if is_dataclass(kind) and (more := told - {each.name for each in fields(kind)}):
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
    known = {name: part for name, part in known.items() if name not in SPENT}
    old_block_size = given["cache"].block_size
    if given["plans"].max_num_batched_tokens is None:
        given["plans"] = replace(given["plans"], max_num_batched_tokens=given["knobs"].batched_tokens)
    wanted = {flag.replace("-", "_"): (flag, text) for flag, text in changes.items()}
    for name, (flag, text) in wanted.items():
        if name in SIZES:
            given[name] = _parsed(flag, SIZES[name], text)
            continue
        if name not in known:
            raise ConfigError(f"a replay cannot change {flag!r}; it can change {', '.join([*known, *SIZES])}")
        part = given[known[name]]
        kind = get_type_hints(type(part), include_extras=True)[name]
        given[known[name]] = replace(part, **{name: _parsed(flag, kind, text)})
    if "num_blocks" not in wanted:  # blocks of another size: the same memory
        given["num_blocks"] = max(1, given["num_blocks"] * old_block_size // given["cache"].block_size)
    given["knobs"] = make_knobs(given["plans"], "cpu", given["max_model_len"])
    if given["plans"].overlap is not None:
        given["overlap"] = given["plans"].overlap


def _parsed(flag: str, kind: Any, text: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        raise ConfigError(f"{flag}={text}: {error.errors()[0]['msg']}") from None
