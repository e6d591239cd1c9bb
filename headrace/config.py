"""The whole configuration, cut into small frozen parts: each class is given only the part it needs.

A field is named once, here: ``max_model_len`` is ``--max-model-len`` on the command line, ``max-model-len`` in a
YAML file, ``HEADRACE_MAX_MODEL_LEN`` in the environment and a keyword of `headrace.LLM`. Only `build` and the
roof above it see more than one part. This is the one file that reads the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError

ENVIRONMENT_PREFIX = "HEADRACE_"
BUILTIN_MODEL = "builtin"


class ConfigError(ValueError):
    """A setting that cannot work, said so that a user can mend it."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which weights, and how they are loaded and computed."""

    model: Annotated[str, Field(description="local folder, hub name, or 'builtin'")] = BUILTIN_MODEL
    revision: Annotated[str | None, Field(description="branch, tag or commit on the hub")] = None
    tokenizer: Annotated[str | None, Field(description="folder or hub name, if not the model's own")] = None
    served_model_name: Annotated[str | None, Field(description="name in the API; default: as given")] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], Field(description="of weights and activations")
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "int8"],
        Field(
            description="of keys and values; auto: as computed; int8: half the memory, slightly less exact"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], Field(description="dummy: random weights, for benchmarks")
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "w4a8"] | None,
        Field(
            description="load plain weights in fewer bits: int8 is W8A8, int4 W4A16, w4a8 W4A8 (groups of 128)"
        ),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="where to compute")] = "auto"
    kernels: Annotated[
        Literal["auto", "torch", "cpp"], Field(description="backend; auto takes the fastest that works here")
    ] = "auto"
    cpu_isa: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"],
        Field(description="instruction set of the kernels 'cpp', instead of the best that is here"),
    ] = "auto"
    max_model_len: Annotated[int | None, Field(ge=2, description="tokens of prompt and output together")] = (
        None
    )
    chat_template: Annotated[str | None, Field(description="Jinja file or text, instead of the model's")] = (
        None
    )
    seed: Annotated[int, Field(ge=0, description="of dummy weights and of requests without a seed")] = 0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How much memory keys and values get, and how it is cut."""

    block_size: Annotated[int, Field(ge=1, le=1024, description="tokens per block")] = 16
    gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1, description="share of the GPU's memory that may be used in all")
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        int | None, Field(ge=1, description="memory for keys and values, instead of what is free")
    ] = None
    enable_prefix_caching: Annotated[
        bool, Field(description="share computed blocks between equal prefixes")
    ] = True
    kv_offload_bytes: Annotated[
        int, Field(ge=0, description="host memory for keys and values that were evicted (0: none)")
    ] = 0
    kv_offload_path: Annotated[
        str | None, Field(description="folder on a disk for those worth most; they outlive a restart")
    ] = None
    kv_offload_disk_bytes: Annotated[int, Field(ge=1, description="how much of that disk they may take")] = (
        16 << 30
    )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How requests become steps."""

    profile: Annotated[
        Literal["interactive", "balanced", "throughput"],
        Field(description="policies and bounds in one choice; each of them can still be set by itself"),
    ] = "balanced"
    scheduling_policy: Annotated[
        Literal["fair", "fcfs", "priority", "static"],
        Field(
            description="fair: shares of classes and tenants, then deadlines; fcfs: arrival alone; "
            "priority: the lowest number first; static: gangs, the textbook baseline"
        ),
    ] = "fair"
    queue_order: Annotated[
        Literal["arrival", "prefix", "shortest"],
        Field(
            description="within a tenant's share, after deadlines and age: prefix lets those go first whose prompt is "
            "in the cache, shortest those predicted to take least"
        ),
    ] = "prefix"
    tenants: Annotated[
        str | None, Field(description="YAML file of tenants and classes: weights, rate limits, quotas, SLOs")
    ] = None
    max_num_seqs: Annotated[int, Field(ge=1, le=4096, description="sequences that run at once")] = 64
    max_num_batched_tokens: Annotated[
        int | None, Field(ge=1, description="tokens computed in one step at most")
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Field(description="split long prompts over steps, mixed with decoding")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, Field(ge=0, description="prefill tokens of one request in a step (0: no bound)")
    ] = 0
    mixed_prefill_ratio: Annotated[
        float,
        Field(ge=0, description="what a prompt may add to a decoding step, as a share of it (0: no bound)"),
    ] = 0.7
    max_step_seconds: Annotated[
        float,
        Field(ge=0, description="predicted time of a step that decodes (0: only as callers' SLOs demand)"),
    ] = 0.1
    static_batch_timeout: Annotated[
        float, Field(ge=0, description="seconds after which an incomplete gang starts")
    ] = 0.1
    overlap: Annotated[
        int | None,
        Field(
            ge=0, le=1, description="1: plan a step while the one before it runs; default: 1 on a GPU, else 0"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, whom it lets in, and how much it takes on."""

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port to listen on (0: any free one)")] = 8000
    allowed_origins: Annotated[
        tuple[str, ...],
        Field(description="an origin whose pages may call from a browser (CORS), or '*'; repeatable"),
    ] = ()
    api_key: Annotated[tuple[str, ...], Field(description="a key that clients must send; repeatable")] = ()
    api_key_file: Annotated[
        str | None, Field(description="file of API keys, one a line, each with its tenant after a space")
    ] = None
    ssl_keyfile: Annotated[str | None, Field(description="TLS private key (PEM)")] = None
    ssl_certfile: Annotated[str | None, Field(description="TLS certificate chain (PEM)")] = None
    max_num_queued_reqs: Annotated[int, Field(ge=1, description="requests that may wait; more get 503")] = (
        1024
    )
    max_num_queued_tokens: Annotated[
        int, Field(ge=1, description="prompt tokens that may wait; more get 503")
    ] = 4_000_000
    request_timeout: Annotated[float, Field(gt=0, description="seconds until a request ends with 408")] = (
        600.0
    )
    max_body_bytes: Annotated[int, Field(ge=1, description="bytes of a request body; more get 413")] = 8 << 20
    stream_interval: Annotated[
        int,
        Field(ge=1, le=4096, description="tokens in a part of a streamed answer; its first comes at once"),
    ] = 1
    drain_timeout: Annotated[float, Field(ge=0, description="seconds to finish answers on SIGTERM")] = 30.0
    metrics_prefix: Annotated[
        str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$", description="'vllm' keeps existing boards working")
    ] = "headrace"
    record_trace: Annotated[
        str | None,
        Field(description="file for all that happens to the engine, without text or tokens: see replay"),
    ] = None
    record_trace_bytes: Annotated[int, Field(ge=1, description="bytes after which the recording ends")] = (
        256 << 20
    )


@dataclass(frozen=True, slots=True)
class ResponseCacheOptions:
    """Which answers are kept instead of computed again, where, and what they would have cost."""

    response_cache: Annotated[
        tuple[str, ...],
        Field(
            description="keep answers of repeatable requests in memory, sqlite:PATH, redis://HOST:PORT/DB or "
            "memcached://HOST:PORT; repeatable, the nearest first; none: no answer is kept"
        ),
    ] = ()
    response_cache_bytes: Annotated[int, Field(ge=1 << 16, description="of the cache in memory")] = 256 << 20
    response_cache_disk_bytes: Annotated[int, Field(ge=1 << 20, description="of the cache in a file")] = (
        4 << 30
    )
    response_cache_ttl: Annotated[
        float, Field(gt=0, description="seconds that an answer is kept, unless its caller says")
    ] = 3600.0
    response_cache_timeout: Annotated[
        float, Field(gt=0, description="seconds that a look-up outside the process may take")
    ] = 0.02
    response_cache_secret: Annotated[
        str | None,
        Field(description="known to the servers that share Redis or Memcached; best in the environment"),
    ] = None
    response_cache_pace: Annotated[
        Literal["immediate", "original"], Field(description="how fast a kept answer is streamed")
    ] = "immediate"
    resume_cache_bytes: Annotated[
        int, Field(ge=0, description="of answers that were left before their end, to be taken up there")
    ] = 16 << 20
    output_index_bytes: Annotated[
        int, Field(ge=0, description="of past outputs, from which continuations are proposed")
    ] = 64 << 20
    input_price: Annotated[float, Field(ge=0, description="of a million prompt tokens, in any currency")] = (
        0.0
    )
    output_price: Annotated[float, Field(ge=0, description="of a million generated tokens")] = 0.0


@dataclass(frozen=True, slots=True)
class SemanticOptions:
    """Whether near questions may be answered with kept answers, and what is promised of those."""

    semantic_cache: Annotated[
        Literal["off", "shadow", "draft", "serve"],
        Field(description="serve a near question's kept answer; shadow: only compare what would be served"),
    ] = "off"
    semantic_calibration: Annotated[
        str | None, Field(description="file that `headrace cache calibrate` wrote")
    ] = None
    semantic_max_error: Annotated[
        float, Field(gt=0, lt=1, description="share of near answers that may be wrong; certified or refused")
    ] = 0.01
    semantic_encoder: Annotated[
        str, Field(description="sentence-transformers folder or hub name, the calibration's")
    ] = "all-MiniLM-L6-v2"
    semantic_deadline: Annotated[
        float, Field(gt=0, description="seconds that a look-up may take; a later one is a miss")
    ] = 0.015
    semantic_audit: Annotated[
        float, Field(ge=0, le=1, description="share of hits that are computed all the same and compared")
    ] = 0.02
    semantic_cache_bytes: Annotated[
        int, Field(ge=1 << 16, description="of questions and vectors in memory")
    ] = 512 << 20


@dataclass(frozen=True, slots=True)
class WarmOptions:
    """What is computed before it is asked for, and when there is time for it."""

    history_file: Annotated[
        str | None, Field(description="SQLite file of which questions come again: hashed, counted, timed")
    ] = None
    record_history: Annotated[
        bool, Field(description="keep the questions' words in it too, so that their answers can be warmed")
    ] = False
    warm_below_rate: Annotated[
        float, Field(gt=0, description="arrivals per second under which there is time to warm")
    ] = 0.5
    warm_batch: Annotated[int, Field(ge=1, le=1024, description="questions computed ahead at once")] = 16
    warm_seconds_per_hour: Annotated[
        float, Field(ge=0, le=3600, description="of the device that warming may take")
    ] = 600.0
    warm_before_ready: Annotated[
        float, Field(ge=0, description="seconds that /health/ready waits at most for the history to be warm")
    ] = 0.0


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Files and batches on the server: where they are stored, and how much a tenant may store and run."""

    batch_path: Annotated[
        str | None,
        Field(description="Folder for /v1/files and /v1/batches (default: none, both are off)."),
    ] = None
    batch_file_bytes: Annotated[
        int, Field(ge=1, description="Maximum size of an uploaded file; larger ones get status 413.")
    ] = 200 << 20
    batch_tenant_bytes: Annotated[
        int, Field(ge=1, description="Total size of one tenant's files; uploads beyond it get status 403.")
    ] = 4 << 30
    batch_tenant_files: Annotated[
        int, Field(ge=1, description="Number of one tenant's files; uploads beyond it get status 403.")
    ] = 1000
    batch_max_lines: Annotated[int, Field(ge=1, description="Maximum number of requests in one batch.")] = (
        50_000
    )
    batch_tenant_batches: Annotated[
        int,
        Field(ge=1, description="Unfinished batches of one tenant; further ones get status 429."),
    ] = 16
    batch_concurrency: Annotated[
        int,
        Field(ge=1, le=1024, description="Requests of batches that run at once, of all batches together."),
    ] = 16


@dataclass(frozen=True, slots=True)
class Options:
    """All parts; what a command line, a file and the environment describe together."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    response_cache: ResponseCacheOptions = field(default_factory=ResponseCacheOptions)
    semantic: SemanticOptions = field(default_factory=SemanticOptions)
    warm: WarmOptions = field(default_factory=WarmOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)


PARTS: dict[str, type] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "server": ServerOptions,
    "response_cache": ResponseCacheOptions,
    "semantic": SemanticOptions,
    "warm": WarmOptions,
    "batch": BatchOptions,
}
_LISTS = ("allowed_origins", "api_key", "response_cache")
"""Options that may be given several times; in the environment, their values are parted by commas."""
_SECRETS = ("api_key", "response_cache_secret")
"""Options whose values no error may show: it ends up in a log."""


_INTERACTIVE = {
    "scheduling_policy": "fair",
    "queue_order": "prefix",
    "max_num_seqs": 32,
    "mixed_prefill_ratio": 0.4,
    "max_step_seconds": 0.05,
    "max_num_queued_reqs": 256,
    "stream_interval": 1,
}
_THROUGHPUT = {
    "scheduling_policy": "fair",
    "queue_order": "prefix",
    "max_num_seqs": 256,
    "mixed_prefill_ratio": 0.0,
    "max_step_seconds": 0.0,
    "max_num_queued_reqs": 16_384,
    "stream_interval": 8,
}
_DEFAULTS = {each.name: each.default for kind in PARTS.values() for each in fields(kind)}
_SWITCHES = {name for name, default in _DEFAULTS.items() if isinstance(default, bool)}

PROFILES: dict[str, dict[str, Any]] = {
    "interactive": _INTERACTIVE,
    "balanced": {name: _DEFAULTS[name] for name in _INTERACTIVE},
    "throughput": _THROUGHPUT,
}
"""What each ``profile`` sets: people wait for every token; some do; nobody does."""


_SERVICE_LINK = re.compile(
    ENVIRONMENT_PREFIX + r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP)(_.*)?)"
)
"""What Kubernetes puts into the environment for a service whose name begins with ours."""


def options(given: Mapping[str, Any], file: Path | None = None) -> Options:
    """All options from what was ``given``, else the environment, a YAML ``file``, the profile, the defaults.

    Raises:
        ConfigError: an unknown name, a value of the wrong type or outside its range, an unreadable file.
    """
    known = {each.name: part for part, kind in PARTS.items() for each in fields(kind)}
    merged: dict[str, Any] = {}
    for source, layer in (
        (f"{file}", _read_yaml(file) if file else {}),
        ("the environment", _read_environment(known)),
        ("the options given", given),
    ):
        for name, value in layer.items():
            if name not in known:
                raise ConfigError(f"{source}: there is no option {name!r}")
            if isinstance(value, bool) and name not in _SWITCHES:  # pydantic would read 1 for true
                raise ConfigError(f"--{name.replace('_', '-')}: it is no switch, got {value}")
            merged[name] = (value,) if name in _LISTS and isinstance(value, str) else value
    merged = PROFILES.get(str(merged.get("profile")), {}) | merged
    parts: dict[str, Any] = {}
    for part, kind in PARTS.items():
        values = {name: value for name, value in merged.items() if known[name] == part}
        try:
            parts[part] = TypeAdapter(kind).validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = "".join(str(place) for place in first["loc"][:1])
            got = "" if name in _SECRETS else f", got {first['input']!r}"
            raise ConfigError(f"--{name.replace('_', '-')}: {first['msg']}{got}") from None
    return Options(**parts)


def profile_line(chosen: Options) -> str:
    """The profile with all that it stands for, and where something else was set."""
    parts = [getattr(chosen, part) for part in PARTS]
    values = {each.name: getattr(part, each.name) for part in parts for each in fields(part)}
    told = []
    for name, usual in PROFILES[chosen.scheduler.profile].items():
        own = "" if values[name] == usual else f" (of itself {usual})"
        told.append(f"{name.replace('_', '-')} {values[name]}{own}")
    return f"{chosen.scheduler.profile}: {', '.join(told)}"


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or no such day
        raise ConfigError(f"{file} cannot be read as YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold one mapping of option names to values")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _read_environment(known: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    variables = {ENVIRONMENT_PREFIX + name.upper(): name for name in known}
    for variable, value in os.environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or _SERVICE_LINK.fullmatch(variable):
            continue
        if variable not in variables:
            near = get_close_matches(variable, variables, n=1)
            hint = f"; do you mean {near[0]}?" if near else ""
            raise ConfigError(f"the environment: {variable} is no option{hint}")
        name = variables[variable]
        values[name] = tuple(each.strip() for each in value.split(",")) if name in _LISTS else value
    return values
