"""Builds an engine that records a scheduler trace, and an engine that replays a trace.

The first line of a trace has all arguments of `make_engine`, so that a replay has exactly the recorded settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from headrace import __version__
from headrace.config import CacheOptions, ConfigError, SchedulerOptions, ServerOptions
from headrace.config.merge import SECRETS
from headrace.config.values import parse_value, plain_reason
from headrace.core.adapters import Adapters
from headrace.core.drafting.forced import ForcedTokens
from headrace.core.drafting.proposal import Drafter
from headrace.core.engine import Engine
from headrace.core.peers import Peers
from headrace.core.ports import Grammars, Runner
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.observe.recording import Tell
from headrace.observe.trace_file import Begun, TraceWriter, plain
from headrace.wiring.drafting import ModelDrafts, make_simulated_drafter
from headrace.wiring.engine import make_engine, make_knobs

SIZES = {"num_blocks": Annotated[int, Field(ge=1)], "max_model_len": Annotated[int, Field(ge=2)]}
"""Numbers that a replay may change in addition to the options."""

SPENT = (
    *("profile", "tenants", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    *("kv_offload_bytes", "kv_offload_path", "kv_offload_disk_bytes"),
    *("kv_transfer_config", "kv_transfer_secret", "state_cache_bytes"),
)
"""Options that only matter while the engine is built; their results are recorded in other settings."""


def open_recording(options: ServerOptions) -> TraceWriter | None:
    """The recording of ``--record-trace``, if there is one.

    Raises:
        ConfigError: its file cannot be written.
    """
    if options.record_trace is None:
        return None
    try:
        return TraceWriter(Path(options.record_trace), options.record_trace_bytes)
    except BlockingIOError:
        raise ConfigError(
            f"--record-trace {options.record_trace}: another server writes to this file"
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--record-trace {options.record_trace} cannot be written: {reason}") from None


def make_recorded_engine(
    tell: Tell,
    plans: SchedulerOptions,
    cache: CacheOptions,
    runner: Runner,
    *,
    grammars: Grammars | None = None,
    adapters: Adapters | None = None,
    peers: Peers | None = None,
    drafts: ModelDrafts | None = None,
    forced: ForcedTokens | None = None,
    **rest: Any,
) -> Engine:
    """`make_engine`, with its arguments and all later events recorded.

    ``grammars`` are not used: a trace has no compile times, so requests do not wait for grammars; the runner compiles
    missing ones itself. There are no ``adapters``: start-up refuses them. ``peers`` are not used either, because a
    trace does not have their responses. ``drafts`` and ``forced`` are not part of the settings, because drafts are
    recorded.
    """
    given = {"plans": plans, "cache": cache} | rest
    hints = get_type_hints(make_engine, include_extras=True)
    settings = {
        name: plain(
            TypeAdapter(hints[name]).dump_python(dict(value) if isinstance(value, Mapping) else value)
        )
        for name, value in given.items()
    }
    for part in ("plans", "cache"):  # without secrets, because a trace may be shared
        settings[part] = {name: value for name, value in settings[part].items() if name not in SECRETS}
    tell(Begun(__version__, settings))
    return make_engine(plans, cache, runner, **rest, tell=tell, drafts=drafts, forced=forced)


def make_engine_again(
    settings: Mapping[str, Any],
    runner: Runner,
    drafter: Drafter | ForcedAcceptance,
    changes: Mapping[str, str] | None = None,
) -> Engine:
    """An engine with a trace's settings and another runner; ``changes`` are options as text, by their names.

    ``drafter`` replays recorded drafts, or is the acceptance of simulated ones.

    Raises:
        ConfigError: the settings are another Headrace version's, or a change has an unknown name or an invalid value.
    """
    given = _read_settings(settings)
    if changes:
        _change(given, changes)
    if isinstance(drafter, ForcedAcceptance):
        return make_engine(runner=runner, **given, drafter=make_simulated_drafter(given["plans"], drafter))
    return make_engine(runner=runner, **given, drafter=drafter)


def _read_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(make_engine, include_extras=True)
    if not isinstance(settings, Mapping) or not {"plans", "cache"} <= settings.keys():
        raise ConfigError("the trace does not begin with the settings of an engine")
    unknown = settings.keys() - hints.keys()
    if unknown:
        raise ConfigError(
            f"the trace has settings that this version of Headrace does not have: {', '.join(sorted(unknown))}"
        )
    given = {}
    for name, value in settings.items():
        kind = hints[name]
        recorded = value.keys() if isinstance(value, Mapping) else set()
        if is_dataclass(kind) and (more := recorded - {each.name for each in fields(kind)}):
            raise ConfigError(
                f"the trace has fields of {name} that this version of Headrace does not have: {', '.join(sorted(more))}"
            )
        try:
            given[name] = TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"the trace's {name} cannot be read: {plain_reason(error)}") from None
    return given


def _change(given: dict[str, Any], changes: Mapping[str, str]) -> None:
    """Apply changes in place. The limits of a step follow the options; all other settings stay as recorded."""
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
    if "num_blocks" not in wanted:  # the same memory, if the block size changes
        given["num_blocks"] = max(1, given["num_blocks"] * old_block_size // given["cache"].block_size)
    given["knobs"] = make_knobs(given["plans"], "cpu", given["max_model_len"])
    if given["plans"].overlap is not None:
        given["overlap"] = given["plans"].overlap


def _parsed(flag: str, kind: Any, text: str) -> Any:
    """The value of an option from text, with its unit if it has one."""
    return parse_value(f"--set {flag}", kind, text)
