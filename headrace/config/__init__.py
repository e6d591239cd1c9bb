"""The configuration, divided into small frozen parts: each class receives only the part that it needs.

Each field is defined once, here: ``max_model_len`` is ``--max-model-len`` on the command line, ``max-model-len`` in a
YAML file, ``HEADRACE_MAX_MODEL_LEN`` in the environment and a keyword argument of `headrace.LLM`. Only `wiring`, `llm`
and `cli` use more than one part. Files in reading order:

| file | content |
|---|---|
| `engine_options` | model, LoRA adapters, embedding and reranking models, KV cache and scheduler |
| `image_options` | images in prompts: how many, and from which hosts |
| `server_options` | address, keys, limits; files and batches; experiments, the tuner; logs, traces, cost |
| `cache_options` | response cache, semantic cache, cache warming |
| `objects` | options whose values are JSON objects |
| `sources` | YAML file and environment; no other file reads the environment |
| `merge` | `Options`: all parts by name; profiles; merges and checks all sources; several models in one server |
| `values` | values from text: sizes and durations with units, and errors that list the accepted values |
| `errors` | `ConfigError`; advice for options and models of other engines |
"""

from headrace.config.cache_options import ResponseCacheOptions, SemanticOptions, WarmOptions
from headrace.config.engine_options import (
    BUILTIN_MODEL,
    AdapterOptions,
    CacheOptions,
    EmbeddingOptions,
    ModelOptions,
    SchedulerOptions,
    check_adapters,
    read_modules,
)
from headrace.config.errors import ConfigError
from headrace.config.image_options import ImageOptions, image_limit, media_domains
from headrace.config.merge import (
    PARTS,
    PROFILES,
    TITLES,
    Options,
    changed_options,
    model_options,
    options,
    parse_option,
    profile_line,
    reread,
)
from headrace.config.server_options import (
    BatchOptions,
    CostOptions,
    ObservabilityOptions,
    ResourceOptions,
    ServerOptions,
    TuningOptions,
)
from headrace.config.sources import (
    ENVIRONMENT_PREFIX,
    Launch,
    Systemd,
    read_launch,
    read_mapping,
    read_systemd,
)

__all__ = [
    "BUILTIN_MODEL",
    "ENVIRONMENT_PREFIX",
    "PARTS",
    "PROFILES",
    "TITLES",
    "AdapterOptions",
    "BatchOptions",
    "CacheOptions",
    "ConfigError",
    "CostOptions",
    "EmbeddingOptions",
    "ImageOptions",
    "Launch",
    "ModelOptions",
    "ObservabilityOptions",
    "Options",
    "ResourceOptions",
    "ResponseCacheOptions",
    "SchedulerOptions",
    "SemanticOptions",
    "ServerOptions",
    "Systemd",
    "TuningOptions",
    "WarmOptions",
    "changed_options",
    "check_adapters",
    "image_limit",
    "media_domains",
    "model_options",
    "options",
    "parse_option",
    "profile_line",
    "read_launch",
    "read_mapping",
    "read_modules",
    "read_systemd",
    "reread",
]
