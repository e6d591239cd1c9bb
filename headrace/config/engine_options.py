"""Options of the engine: the model, its LoRA adapters, its KV cache and the scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from headrace.config.errors import ConfigError
from headrace.config.values import BYTES, SECONDS

BUILTIN_MODEL = "builtin"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model to load, and how to compute it."""

    model: Annotated[
        str,
        Field(
            description="Model to load: a local folder, a GGUF file, a Hugging Face name such as Qwen/Qwen3-0.6B or"
            " org/name-GGUF:Q4_K_M, or builtin."
        ),
    ] = BUILTIN_MODEL
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Field(
            description="Use of MODEL. generate: text; pooling: embeddings or scores only; auto: pooling for encoders "
            "and for folders of sentence-transformers, else generate."
        ),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        Field(
            description="Implementation of MODEL. native: a model family of this project; transformers: the modelling "
            "code of the package transformers, with the engine's attention and memory; auto: native if there is a "
            "family, else transformers."
        ),
    ] = "auto"
    revision: Annotated[
        str | None, Field(description="Branch, tag or commit of a Hugging Face model (default: main).")
    ] = None
    tokenizer: Annotated[
        str | None,
        Field(
            description="Folder, GGUF file or Hugging Face name of the tokenizer (default: the model's own)."
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Field(
            description="Model name in the API. Several names after the flag, or the flag repeated: requests may use "
            "any of them, and answers and metrics have the first (default: MODEL as given)."
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Field(
            description="Data type of weights and activations; auto takes the model's, if the device has it."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "int8", "fp8"],
        Field(
            description="Data type of the KV cache; auto takes --dtype, and bfloat16 where --dtype auto computes a "
            "bfloat16 model in float32; int8 needs half the memory and is slightly less exact, fp8 (with --kernels "
            "triton on a GPU) needs as little as int8; bfloat16 needs half the memory of float32."
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Field(description="Source of the weights; dummy draws random weights, for benchmarks."),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "w4a8", "fp8"] | None,
        Field(
            description="Quantize plain weights while loading: int8 (W8A8), int4 (W4A16) or w4a8 (W4A8), these two in "
            "groups of 128; or fp8 (W8A8), with --kernels triton on a GPU (default: as stored)."
        ),
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Field(description="Device to compute on; auto takes a GPU if there is one."),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "torch", "cpp", "triton"],
        Field(
            description="Kernel backend; auto takes cpp on a CPU, and on a GPU triton if a check at start finds that "
            "its results agree with those of torch, else torch."
        ),
    ] = "auto"
    cpu_isa: Annotated[
        Literal["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"],
        Field(description="Instruction set of the cpp kernels; auto takes the best that the processor has."),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Field(
            ge=1,
            description="Number of ranks (processes) that divide every layer of the model, with a GPU each or "
            "together on the CPU.",
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        Field(
            description="Give each rank of --tensor-parallel-size some whole experts of a mixture, in place of some "
            "columns of every expert. Attention is divided as without it.",
        ),
    ] = False
    pipeline_parallel_size: Annotated[
        int,
        Field(
            ge=1,
            description="Number of stages that have some layers of the model each; each stage has "
            "--tensor-parallel-size ranks.",
        ),
    ] = 1
    rank_secret: Annotated[
        str | None,
        Field(
            description="Secret that all ranks know which a launcher started; needed if MASTER_ADDR is not a loopback "
            "address. Set HEADRACE_RANK_SECRET instead of the flag."
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        Field(
            description="Launch decode steps operation by operation. By default they are recorded as CUDA graphs at "
            "start-up, if the kernels allow it."
        ),
    ] = False
    max_model_len: Annotated[
        int | None,
        Field(
            ge=2,
            description="Maximum context length in tokens, prompt plus output (default: the model's maximum).",
        ),
    ] = None
    chat_template: Annotated[
        str | None, Field(description="Jinja chat template, as a file or as text (default: the model's own).")
    ] = None
    allow_special_tokens_in_content: Annotated[
        bool,
        Field(
            description="Let text in messages, tools and documents that spells a special token become that token. By "
            "default it stays text, so that content cannot end a turn or begin another. Prompts of /v1/completions "
            "are not affected."
        ),
    ] = False
    generation_config: Annotated[
        str,
        Field(
            description="Source of the sampling defaults: auto takes the model's generation_config.json, vllm none; or "
            "a folder or file. max_new_tokens of a folder or file also limits the output of every request."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str | None,
        Field(
            description="Sampling defaults that replace those of --generation-config, as a JSON object with the fields "
            'of that file, for example {"temperature": 0.6} (default: none).'
        ),
    ] = None
    seed: Annotated[
        int, Field(ge=0, description="Seed of requests without their own seed, and of dummy weights.")
    ] = 0


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Memory for the keys and values of tokens (the KV cache), on the device, in host memory and on disk."""

    block_size: Annotated[int, Field(ge=1, le=1024, description="Tokens per block of the KV cache.")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Field(
            gt=0, le=1, description="Share of the GPU's memory for weights, activations and KV cache, 0 to 1."
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        int | None,
        Field(
            ge=1,
            description="Memory of the KV cache on the device (default: all that is free).",
            json_schema_extra=BYTES,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Field(description="Share KV blocks between requests that begin with the same tokens.")
    ] = True
    enable_window_groups: Annotated[
        bool,
        Field(
            description="Give back the KV blocks of sliding-window layers behind the window, where model, device and "
            "other options allow it. Otherwise all layers keep all tokens."
        ),
    ] = True
    state_cache_bytes: Annotated[
        int | None,
        Field(
            ge=0,
            description="Memory for checkpoints of the recurrent states of a hybrid model, from which requests with "
            "the same beginning continue (default: a quarter of the KV cache); 0 stores none, so every prompt is "
            "computed as a whole.",
            json_schema_extra=BYTES,
        ),
    ] = None
    state_cache_interval: Annotated[
        int,
        Field(
            ge=0,
            description="Number of tokens between checkpoints of recurrent states within a long prompt; 0: only at its "
            "end and where prompts part.",
        ),
    ] = 2048
    kv_offload_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Host memory for KV blocks that were evicted from the device; 0 stores none.",
            json_schema_extra=BYTES,
        ),
    ] = 0
    kv_offload_path: Annotated[
        str | None,
        Field(
            description="Folder on a disk for the most valuable KV blocks, which survive a restart (default: none)."
        ),
    ] = None
    kv_offload_disk_bytes: Annotated[
        int,
        Field(ge=1, description="Disk space for KV blocks in --kv-offload-path.", json_schema_extra=BYTES),
    ] = 16 << 30
    kv_transfer_config: Annotated[
        str | None,
        Field(
            description="JSON object with vLLM's keys: exchange KV blocks with other servers, as a kv_producer, "
            "kv_consumer or kv_both (default: none)."
        ),
    ] = None
    kv_transfer_secret: Annotated[
        str | None,
        Field(
            description="Secret that all servers of --kv-transfer-config know. Set HEADRACE_KV_TRANSFER_SECRET instead "
            "of the flag."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Which requests run in a step, in which order, and how much a step computes."""

    profile: Annotated[
        Literal["interactive", "balanced", "throughput"],
        Field(
            description="Preset of policies and limits: low latency, a balance, or most tokens per second. Options "
            "that are also given override it."
        ),
    ] = "balanced"
    scheduling_policy: Annotated[
        Literal["fair", "fcfs", "priority", "static"],
        Field(
            description="Scheduling policy. fair: weighted shares of classes and tenants, then latency targets; "
            "fcfs: order of arrival; priority: lowest number first; static: static batches, as a baseline."
        ),
    ] = "fair"
    queue_order: Annotated[
        str,
        Field(
            description="Order within a queue, after latency targets and age. prefix: requests whose prompt is cached "
            "first; shortest: least predicted work first (both need --scheduling-policy fair); arrival; auto: prefix "
            "with fair, arrival otherwise; or your own class, MODULE:CLASS."
        ),
    ] = "auto"
    admission_policy: Annotated[
        str,
        Field(
            description="When waiting requests join the batch. continuous: at any step; static: when the whole batch "
            "has ended; auto: as --scheduling-policy implies; or your own class, MODULE:CLASS."
        ),
    ] = "auto"
    victim_policy: Annotated[
        str,
        Field(
            description="Which request is preempted when KV memory runs out. lowest-recompute-cost: the cheapest to "
            "recompute; last-ranked: the last of the queue order; auto: as --scheduling-policy implies; or your own "
            "class, MODULE:CLASS."
        ),
    ] = "auto"
    eviction_policy: Annotated[
        str,
        Field(
            description="Which cached KV block is evicted first. cost-aware: by retention, demand, age and "
            "recomputation cost; lru: least recently used; or your own class, MODULE:CLASS."
        ),
    ] = "cost-aware"
    tenants: Annotated[
        str | None,
        Field(
            description="YAML file of tenants and classes: weights, rate limits, quotas and latency targets "
            "(default: all tenants equal)."
        ),
    ] = None
    max_num_seqs: Annotated[
        int, Field(ge=1, le=4096, description="Maximum number of sequences that run at once.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int | None,
        Field(
            ge=1, description="Maximum number of tokens in one step (default: 1024 on a CPU, 8192 on a GPU)."
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, Field(description="Compute long prompts in several steps, together with decoding.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, Field(ge=0, description="Maximum prefill tokens of one request in a step; 0 sets no limit.")
    ] = 0
    mixed_prefill_ratio: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="Time that prefill may add to a decoding step, as a share of the step; 0 sets no limit.",
            json_schema_extra={"expected": "a finite number of at least 0"},
        ),
    ] = 0.7
    max_step_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="Maximum predicted time of a step that decodes; 0 applies only the requests' latency "
            "targets.",
            json_schema_extra=SECONDS,
        ),
    ] = 0.1
    static_batch_timeout: Annotated[
        float,
        Field(
            ge=0,
            description="Time after which an incomplete batch starts under --scheduling-policy static.",
            json_schema_extra=SECONDS,
        ),
    ] = 0.1
    overlap: Annotated[
        int | None,
        Field(
            ge=0,
            le=1,
            description="1 plans a step while the previous one runs, and keeps all stages of a pipeline busy; 0 does "
            "not (default: 1 on a GPU, else 0).",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        Field(
            description="Speculative decoding as a JSON object: method (ngram, suffix, prediction, cached, "
            "draft_model, eagle3, or a list), num_speculative_tokens and more; see the guide (default: none)."
        ),
    ] = None


# Options of embeddings, reranking and scores: their models.


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """The models of `/v1/embeddings`, `/v1/rerank` and `/v1/score`, which are computed between the engine's steps."""

    embedding_model: Annotated[
        str | None,
        Field(
            description="Model of /v1/embeddings: a folder or Hugging Face name of an encoder, or of a decoder, "
            "which may be MODEL itself (default: none)."
        ),
    ] = None
    rerank_model: Annotated[
        str | None,
        Field(
            description="Cross-encoder of /v1/rerank and /v1/score (default: none; they compare embeddings)."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """LoRA adapters of the model: which ones, how many at once, and how large."""

    enable_lora: Annotated[
        bool,
        Field(description="Serve LoRA adapters of the model, each under its own model name."),
    ] = False
    max_loras: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="Maximum number of LoRA adapters whose requests run at once, on the device.",
        ),
    ] = 1
    max_lora_rank: Annotated[int, Field(ge=1, le=1024, description="Highest rank of a LoRA adapter.")] = 16
    max_cpu_loras: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Maximum number of LoRA adapters in host memory; others are read again from their folders "
            "(default: --max-loras).",
        ),
    ] = None

    @property
    def host_adapters(self) -> int:
        """The most adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


class AdapterModule(NamedTuple):
    """An adapter that is loaded at start."""

    name: str
    path: str
    base: str = ""  # the model that it is for; empty: the served one


def check_adapters(options: AdapterOptions, modules: Sequence[str]) -> None:
    """Raise ConfigError for options that need each other; ``modules`` are those of ``--lora-modules``."""
    if not options.enable_lora:
        names = [each.name for each in fields(options)]
        given = [name for name in names if getattr(options, name) != getattr(AdapterOptions(), name)]
        for name in (*given, *(["lora_modules"] if modules else [])):
            raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora")
    if options.host_adapters < options.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {options.max_cpu_loras} is less than --max-loras {options.max_loras}: an adapter on the"
            " device is also in host memory"
        )


def read_modules(given: Sequence[str]) -> list[AdapterModule]:
    """The adapters of ``--lora-modules``.

    Raises:
        ConfigError: a value has neither form, or a name stands twice.
    """
    modules = [_module(value) for value in given]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora-modules: the name {name!r:.200} stands twice")
    return modules


def _module(value: str) -> AdapterModule:
    name, found, path = value.partition("=")
    base = ""
    if value.lstrip().startswith("{"):
        name, path, base = _from_object(value)
    elif not found:
        name = ""
    if not name.strip() or not path.strip():
        raise ConfigError(
            f"--lora-modules: expected NAME=FOLDER, or a JSON object with name and path, got {value!r:.200}"
        )
    return AdapterModule(name.strip(), path.strip(), base)


def _from_object(value: str) -> AdapterModule:
    try:
        given: dict[str, Any] = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"--lora-modules: {value!r:.200} is not JSON: {error}") from None
    unknown = sorted(given.keys() - {"name", "path", "base_model_name"})
    if unknown:
        raise ConfigError(f"--lora-modules: unknown keys {', '.join(unknown)}; expected name and path")
    values = [given.get(key) or "" for key in ("name", "path", "base_model_name")]
    if not all(isinstance(each, str) for each in values):
        return AdapterModule("", "")
    return AdapterModule(*values)
