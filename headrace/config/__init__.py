"""The configuration, divided into small frozen parts: each class receives only the part that it needs.

Each field is defined once, here: ``max_model_len`` is ``--max-model-len`` on the command line, ``max-model-len`` in a
YAML file, ``HEADRACE_MAX_MODEL_LEN`` in the environment and a keyword argument of `headrace.LLM`. Only `build`, `llm`
and `cli` use more than one part. Files in reading order:

| file | content |
|---|---|
| `engine_options` | model, KV cache and scheduler |
| `embedding_options` | embedding and reranking models |
| `server_options` | address, keys, limits; experiments and the tuner |
| `observability_options` | logs, traces, cost and resources |
| `cache_options` | response cache, semantic cache, cache warming |
| `batch_options` | files and batches |
| `parts` | all parts by name, and `Options` |
| `objects` | options whose values are JSON objects |
| `profiles` | presets of several settings |
| `yaml_files` | a mapping from a YAML file |
| `sources` | YAML file and environment; no other file reads the environment |
| `merge` | merges and checks all sources |
| `validation` | values from text, and errors that list the accepted values |
| `quantities` | sizes and durations with units |
| `foreign` | advice for options and models of other engines |
| `errors` | `ConfigError` |
"""

from headrace.config.batch_options import BatchOptions
from headrace.config.cache_options import ResponseCacheOptions, SemanticOptions, WarmOptions
from headrace.config.embedding_options import EmbeddingOptions
from headrace.config.engine_options import BUILTIN_MODEL, CacheOptions, ModelOptions, SchedulerOptions
from headrace.config.errors import ConfigError
from headrace.config.merge import changed_options, options, parse_option, reread
from headrace.config.observability_options import CostOptions, ObservabilityOptions, ResourceOptions
from headrace.config.parts import PARTS, TITLES, Options
from headrace.config.profiles import PROFILES, profile_line
from headrace.config.server_options import ServerOptions, TuningOptions
from headrace.config.sources import ENVIRONMENT_PREFIX, Launch, Systemd, read_launch, read_systemd
from headrace.config.yaml_files import read_mapping

__all__ = [
    "BUILTIN_MODEL",
    "ENVIRONMENT_PREFIX",
    "PARTS",
    "PROFILES",
    "TITLES",
    "BatchOptions",
    "CacheOptions",
    "ConfigError",
    "CostOptions",
    "EmbeddingOptions",
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
    "options",
    "parse_option",
    "profile_line",
    "read_launch",
    "read_mapping",
    "read_systemd",
    "reread",
]
