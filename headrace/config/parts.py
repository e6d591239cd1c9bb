"""All parts of the configuration by name, and `Options`, which has one of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace.config.adapter_options import AdapterOptions
from headrace.config.cache_options import ResponseCacheOptions, SemanticOptions, WarmOptions
from headrace.config.engine_options import CacheOptions, EmbeddingOptions, ModelOptions, SchedulerOptions
from headrace.config.image_options import ImageOptions
from headrace.config.server_options import (
    BatchOptions,
    CostOptions,
    ObservabilityOptions,
    ResourceOptions,
    ServerOptions,
    TuningOptions,
)


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
