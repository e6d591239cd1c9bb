"""The error of an invalid setting, a suggestion for a name that does not exist, and advice for options and model files
that other engines accept and Headrace does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MAX_MESSAGE = 2400
"""Characters of a message; the names of all model families have 1,900."""


def shortened(message: str) -> str:
    """A message without its middle if it is long: what it quotes of a file may have any length."""
    left = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:left]} … {message[-left:]}"


class ConfigError(ValueError):
    """An invalid setting. The message names the setting and what would be valid."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean NAME?`` for the known name closest to ``name``, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


_REPLICAS = "run one server per replica behind a load balancer. Leave the option out"
_TENSOR = "use --tensor-parallel-size"
_DRAFTS = 'write it into the JSON object of --speculative-config, for example \'{"method": "ngram"}\''
_GRAPHS = (
    "Headrace compiles no model, and records CUDA graphs for all decode steps that --max-num-seqs allows. Leave the "
    "option out; --enforce-eager records none"
)
_OWN_SETTINGS = "Processors run with the settings of the model's files. Leave the option out"
_MODEL = "give the model as an argument: headrace serve MODEL"
_SCHEDULER = "there is one scheduler. Leave the option out"

ADVICE = {
    # vLLM
    "data_parallel_size": _REPLICAS,
    "distributed_executor_backend": "ranks are always processes of one machine. Leave the option out",
    "fully_sharded_loras": "an adapter is never divided, because it needs the whole model in one process",
    "lora_dtype": "adapters are computed in --dtype. Leave the option out",
    "default_mm_loras": "adapters are chosen by the request's model name. Leave the option out",
    "speculative_model": _DRAFTS,
    "num_speculative_tokens": _DRAFTS,
    "compilation_config": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "max_seq_len_to_capture": _GRAPHS,
    "mm_processor_kwargs": _OWN_SETTINGS,
    "swap_space": "give the host memory for evicted KV blocks with --kv-offload-bytes 4GiB",
    "cpu_offload_gb": "weights stay on the device. Store them in fewer bits with --quantization int8 or int4; "
    "evicted KV blocks can go to host memory with --kv-offload-bytes",
    "num_gpu_blocks_override": "set the size of the KV cache with --kv-cache-memory-bytes 2GiB",
    "trust_remote_code": "Headrace never runs code of a model repository. Leave the option out; "
    "docs/guide/models.md lists the supported model families",
    "tokenizer_mode": "there is one tokenizer implementation. Leave the option out",
    "download_dir": "set the folder for downloads with the environment variable HF_HOME",
    "hf_token": "set the token with the environment variable HF_TOKEN",
    "disable_log_requests": "requests are not logged with their content. --no-access-log also leaves out the line "
    "per request",
    "disable_hybrid_kv_cache_manager": "use --no-enable-window-groups",
    "disable_log_stats": "statistics are served at /metrics only. Leave the option out",
    "max_num_partial_prefills": _SCHEDULER,
    "async_scheduling": "use --overlap 1 to plan a step while the previous one runs",
    "scheduler_delay_factor": _SCHEDULER,
    "preemption_mode": "preempted requests are recomputed, or restored from host memory with --kv-offload-bytes. "
    "Leave the option out",
    "task": "use --runner pooling for a model of embeddings or scores, --runner generate for one that writes text",
    "convert": "use --runner pooling; a cross-encoder is recognized by its architecture",
    "pooler_config": "pooling is read from the model's modules.json. Leave the option out",
    "is_embedding": "use --runner pooling",
    "root_path": "configure the path prefix in the reverse proxy. Leave the option out",
    "uvicorn_log_level": "leave the option out",
    "model": _MODEL,
    # SGLang
    "model_path": _MODEL,
    "tp": _TENSOR,
    "tp_size": _TENSOR,
    "pp_size": "use --pipeline-parallel-size",
    "dp_size": _REPLICAS,
    "context_length": "use --max-model-len",
    "mem_fraction_static": "use --gpu-memory-utilization",
    "max_running_requests": "use --max-num-seqs",
    "chunked_prefill_size": "use --max-num-batched-tokens",
    "schedule_policy": "use --scheduling-policy",
    "disable_radix_cache": "use --no-enable-prefix-caching",
    # Text Generation Inference
    "model_id": _MODEL,
    "num_shard": _TENSOR,
    "quantize": "use --quantization int8, int4 or w4a8; headrace quantize writes a quantized model",
    "max_concurrent_requests": "use --max-num-seqs for requests that run, --max-num-queued-reqs for those that wait",
    "max_input_length": "use --max-model-len for prompt and output together",
    "max_total_tokens": "use --max-model-len",
    "max_batch_prefill_tokens": "use --max-num-batched-tokens",
    # llama.cpp
    "ctx_size": "use --max-model-len",
    "n_gpu_layers": "use --device cuda or --device cpu: all layers run on the same kind of device",
    "parallel": "use --max-num-seqs",
    "batch_size": "use --max-num-seqs for requests that run at once, --max-num-batched-tokens for tokens per step",
    "ubatch_size": "use --max-num-batched-tokens",
    "cont_batching": "batching is always continuous. Leave the option out",
    "flash_attn": "the kernels are chosen with --kernels. Leave the option out",
    "cache_type_k": "use --kv-cache-dtype int8 for keys and values together",
    "cache_type_v": "use --kv-cache-dtype int8 for keys and values together",
}
"""Options of vLLM, SGLang, Text Generation Inference and llama.cpp by their names, and what to do instead."""


def advice(name: str) -> str | None:
    """What to do instead of an option of another engine; None for a name that no engine is known to have."""
    return ADVICE.get(name.lstrip("-").replace("-", "_").lower())


def model_advice(model: str) -> str | None:
    """What to do instead of a model in another engine's format; None for any other model."""
    name = model.lower()
    if name.startswith(("ollama/", "ollama:")):
        return (
            "Ollama's model names are not known here. Give a Hugging Face name, for example Qwen/Qwen3-0.6B, or"
            " a GGUF file or repository, for example org/name-GGUF:Q4_K_M"
        )
    return None
