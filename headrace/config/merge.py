"""All parts of the configuration by name, `Options`, which has one of each, and how sources of settings become checked
parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from headrace.config.cache_options import ResponseCacheOptions, SemanticOptions, WarmOptions
from headrace.config.engine_options import (
    AdapterOptions,
    CacheOptions,
    EmbeddingOptions,
    ModelOptions,
    SchedulerOptions,
)
from headrace.config.errors import ConfigError, model_advice
from headrace.config.image_options import ImageOptions
from headrace.config.objects import OBJECTS, object_text
from headrace.config.server_options import (
    BatchOptions,
    CostOptions,
    ObservabilityOptions,
    ResourceOptions,
    ServerOptions,
    TuningOptions,
)
from headrace.config.sources import Setting, from_call, from_environment, from_yaml
from headrace.config.values import parse_host, parse_value


@dataclass(frozen=True, slots=True)
class Source:
    """Where options came from: those ``given`` directly, and the YAML ``file``."""

    given: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """All parts, merged from the command line, a file, the environment and the defaults.

    ``chosen`` has the names of options that do not come from the defaults; ``source`` is their origin.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    embedding: EmbeddingOptions = field(default_factory=EmbeddingOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    response_cache: ResponseCacheOptions = field(default_factory=ResponseCacheOptions)
    semantic: SemanticOptions = field(default_factory=SemanticOptions)
    warm: WarmOptions = field(default_factory=WarmOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    observability: ObservabilityOptions = field(default_factory=ObservabilityOptions)
    cost: CostOptions = field(default_factory=CostOptions)
    resources: ResourceOptions = field(default_factory=ResourceOptions)
    tuning: TuningOptions = field(default_factory=TuningOptions)
    chosen: frozenset[str] = field(default=frozenset(), compare=False)
    source: Source = field(default_factory=Source, compare=False, repr=False)


PARTS: dict[str, type] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "adapters": AdapterOptions,
    "images": ImageOptions,
    "embedding": EmbeddingOptions,
    "server": ServerOptions,
    "response_cache": ResponseCacheOptions,
    "semantic": SemanticOptions,
    "warm": WarmOptions,
    "batch": BatchOptions,
    "observability": ObservabilityOptions,
    "cost": CostOptions,
    "resources": ResourceOptions,
    "tuning": TuningOptions,
}

TITLES: dict[str, str] = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "adapters": "LoRA adapters",
    "images": "Images",
    "embedding": "Embeddings",
    "server": "Server",
    "response_cache": "Response cache",
    "semantic": "Semantic cache",
    "warm": "Cache warming",
    "batch": "Files and batches",
    "observability": "Logs and traces",
    "cost": "Cost",
    "resources": "Resources",
    "tuning": "Experiments and tuner",
}
"""The heading of each part in ``--help`` and in the reference."""


# Profiles: presets of several settings, selected with ``--profile``.

_INTERACTIVE = {
    "scheduling_policy": "fair",
    "queue_order": "auto",
    "max_num_seqs": 32,
    "mixed_prefill_ratio": 0.4,
    "max_step_seconds": 0.05,
    "max_num_queued_reqs": 256,
    "stream_interval": 1,
}
_THROUGHPUT = {
    "scheduling_policy": "fair",
    "queue_order": "auto",
    "max_num_seqs": 256,
    "mixed_prefill_ratio": 4.0,  # docs/decisions/scheduling.md#prefill-beside-decoding-for-throughput
    "max_step_seconds": 0.0,
    "max_num_queued_reqs": 16_384,
    "stream_interval": 8,
}
_DEFAULTS = {each.name: each.default for kind in PARTS.values() for each in fields(kind)}

PROFILES: dict[str, dict[str, Any]] = {
    "interactive": _INTERACTIVE,
    "balanced": {name: _DEFAULTS[name] for name in _INTERACTIVE},
    "throughput": _THROUGHPUT,
}
"""The settings of each profile: low latency for people, a balance, or the most tokens per second for batch work."""


def profile_line(chosen: Options) -> str:
    """The profile with the values of its settings; if a value differs from the profile's, both are shown."""
    parts = [getattr(chosen, part) for part in PARTS]
    values = {each.name: getattr(part, each.name) for part in parts for each in fields(part)}
    shown = []
    for name, usual in PROFILES[chosen.scheduler.profile].items():
        note = "" if values[name] == usual else f" (profile default {usual})"
        shown.append(f"{name.replace('_', '-')} {values[name]}{note}")
    return f"{chosen.scheduler.profile}: {', '.join(shown)}"


LISTS = (
    *("allowed_hosts", "allowed_origins", "api_key", "admin_key", "metrics_key"),
    *("response_cache", "served_model_name", "lora_modules", "allowed_media_domains"),
)
"""Options that may be given several times."""

SECRETS = (
    "api_key",
    "admin_key",
    "metrics_key",
    "response_cache_secret",
    "kv_transfer_secret",
    "rank_secret",
)
"""Options whose values no error may show, because errors are logged."""


def options(given: Mapping[str, Any], file: Path | None = None, *, keywords: bool = False) -> Options:
    """All options: those ``given``, or else from the environment, a YAML ``file``, the profile, or the defaults.

    ``keywords`` names the fields of ``given`` in errors as keyword arguments instead of command-line flags.

    Raises:
        ConfigError: a name is unknown, a value has the wrong type or range, or the file cannot be read.
    """
    known = _hints()
    settings: dict[str, Setting] = from_yaml(file, known) if file else {}
    settings |= from_environment(known, LISTS)
    settings |= from_call(given, known, keywords=keywords)
    values = {name: _parsed(name, setting) for name, setting in settings.items()}
    profile = PROFILES[values["profile"]] if "profile" in values else {}
    chosen = frozenset(values) | frozenset(profile)
    values = profile | values
    if (what := model_advice(values.get("model", ""))) is not None:
        raise ConfigError(f"MODEL {values['model']}: {what}")
    parts = {
        part: kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})
        for part, kind in PARTS.items()
    }
    return Options(**parts, chosen=chosen, source=Source(given, file))


def reread(old: Options) -> Options:
    """The options read again: from the same file, the environment and the values that were given directly.

    Raises:
        ConfigError: as `options`.
    """
    return options(old.source.given, old.source.file)


def model_options(given: Sequence[Options]) -> list[Options]:
    """The options of each model of one server; a server of one model has those that are ``given``.

    ``given`` has one for each MODEL of the command line. Else ``--models`` lists the models.

    Raises:
        ConfigError: as `options`; or models are named in both ways, or would use the same files.
    """
    first, *others = given
    if first.server.models is None:
        if others:
            _check_own_files(given)
        return list(given)
    if "model" in first.chosen:
        raise ConfigError("MODEL and --models both name models; name all of them in one place")
    common = {name: value for name, value in first.source.given.items() if name != "models"}
    found = []
    for number, entry in enumerate(json.loads(first.server.models)):
        try:
            found.append(options({**common, **entry}, first.source.file))
        except ConfigError as error:
            raise ConfigError(f"models[{number}] ({entry['model']}): {error}") from None
    _check_own_files(found)
    return found


def _check_own_files(models: Sequence[Options]) -> None:
    """Raise ConfigError if two models would write to the same file or folder."""
    for name in OF_ONE:
        part = next(part for part, kind in PARTS.items() if name in {each.name for each in fields(kind)})
        paths = [path for each in models if (path := getattr(getattr(each, part), name)) is not None]
        if len({*paths}) < len(paths):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} {paths[0]}: several models cannot share it; give each entry of models its own {flag}"
            )


def changed_options(old: Options, new: Options) -> list[str]:
    """The names of the options whose values differ."""
    return [
        each.name
        for part, kind in PARTS.items()
        for each in fields(kind)
        if getattr(getattr(old, part), each.name) != getattr(getattr(new, part), each.name)
    ]


def parse_option(name: str, label: str, value: Any) -> Any:
    """One option's value, checked; an error names it ``label``.

    Raises:
        ConfigError: the value has the wrong type or is out of range.
    """
    return parse_value(label, _hints()[name], value, secret=name in SECRETS)


def _parsed(name: str, setting: Setting) -> Any:
    value = setting.value
    if name in LISTS and isinstance(value, str):
        value = (value,)
    if name == "host":
        value = parse_host(setting.label, value)
    if name == "models":
        value = models_text(setting.label, value)
    if name in OBJECTS:
        value = object_text(name, setting.label, value)
    return parse_option(name, setting.label, value)


@cache
def _hints() -> dict[str, Any]:
    """The annotation of every option, by name."""
    hints: dict[str, Any] = {}
    for kind in PARTS.values():
        annotations = get_type_hints(kind, include_extras=True)
        hints |= {each.name: annotations[each.name] for each in fields(kind)}
    return hints


# -- several models: --models

EXAMPLE = '[{"model": "Qwen/Qwen3-0.6B"}, {"model": "builtin", "kv-cache-memory-bytes": "256MiB"}]'

OF_ALL = frozenset(
    {
        *("models", "host", "port", "uds", "ssl_keyfile", "ssl_certfile", "metrics_port", "metrics_prefix"),
        *("allowed_hosts", "allowed_origins", "api_key", "api_key_file", "admin_key", "metrics_key"),
        *("drain_timeout", "log_level", "log_format", "api_server_count"),
    }
)
"""Options of the server as a whole, which no model has for itself."""

OF_ONE = (
    *("batch_path", "experiments_file", "history_file", "kv_offload_path", "record_trace"),
    *("response_store", "usage_file"),
)
"""Files and folders that one model's process has for itself."""


def models_text(label: str, value: Any) -> str | None:
    """The value of ``--models`` as JSON text, with the options' names as in `Options`; None stays None.

    It is a list of objects: the names and values of options, as in the YAML file. An option of an object overrides the
    same option of the command line, of the environment and of the file, which hold for all models.

    Raises:
        ConfigError: it is no list of objects, an object names no model, or has an option of the whole server.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{label}: expected a JSON list such as {EXAMPLE}: {error}") from None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(e, Mapping) for e in value):
        raise ConfigError(f"{label}: expected a list of objects such as {EXAMPLE}")
    entries = [_entry(f"{label}[{number}]", each) for number, each in enumerate(value)]
    try:
        return json.dumps(entries)
    except (TypeError, ValueError) as error:  # a date of YAML, for example
        raise ConfigError(f"{label}: expected plain values: {error}") from None


def _entry(label: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in entry:
            raise ConfigError(f"{label}: the option {key} stands twice, with - and with _")
        if name in OF_ALL:
            raise ConfigError(f"{label}: {key} is an option of the whole server; move it out of the list")
        entry[name] = value
    if not isinstance(entry.get("model"), str):
        raise ConfigError(f"{label}: model is missing; it names the model to load")
    return entry
