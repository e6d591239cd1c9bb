"""The whole configuration, cut into small frozen parts: each class is given only the part it needs.

Field names are the flags of the command line (``max_model_len`` is ``--max-model-len``). Only `build` and the
command line see more than one part. This is the one file that reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

ENVIRONMENT_PREFIX = "HEADRACE_"
BUILTIN_MODEL = "builtin"


class ConfigError(ValueError):
    """A setting that cannot work, said so that a user can mend it."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which weights, and how they are loaded and computed."""

    model: str = BUILTIN_MODEL
    revision: str | None = None
    tokenizer: str | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "torch", "cpp"] = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How much memory keys and values get, and how it is cut."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How requests become steps."""

    scheduling_policy: Literal["fcfs", "priority", "static"] = "fcfs"
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    mixed_prefill_tokens: int | None = None
    static_batch_timeout: float = 0.1
    overlap: Literal[0, 1] = 1


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, whom it lets in, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 4_000_000
    request_timeout: float = 600.0
    max_body_bytes: int = 8 * 1024 * 1024
    drain_timeout: float = 30.0
    metrics_prefix: str = "headrace"


@dataclass(frozen=True, slots=True)
class Options:
    """All parts; what a command line or a YAML file describes."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    server: ServerOptions = field(default_factory=ServerOptions)


def environment(name: str) -> str | None:
    """The value of ``HEADRACE_<NAME>``, or None."""
    return os.environ.get(ENVIRONMENT_PREFIX + name.upper())
