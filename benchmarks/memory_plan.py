"""The memory plan compared with the memory that a process uses: models of published sizes with some of their layers.

Weights are drawn at random. Prompts fill the KV cache and the largest step, and all sequences generate at once, twice.
What a process uses is the most resident memory that it had once loaded. It has libraries in it, as the plan has.
Anonymous memory (``RssAnon``) is less by pages of files, which can be dropped at any time. Each model has a process of
its own. The folder of a model can then be measured by ``headrace bench roofline --load-format dummy``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.vocabulary import tokenizer

SLIDING, FULL = "sliding_attention", "full_attention"

DELTA: dict[str, Any] = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""What the models with a gated delta rule have in common."""

MANY: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "linear_num_value_heads": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", FULL],
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
"""What those with experts have in common."""

MODELS: Mapping[str, Mapping[str, Any]] = {
    "gemma-4-e2b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
        "layer_types": [*[SLIDING] * 4, FULL] * 2,
    },
    "gemma-4-31b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "layer_types": [*[SLIDING] * 3, FULL],
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "layer_types": [SLIDING, FULL] * 2,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "qwen3.5-0.8b": DELTA
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
        "layer_types": [*["linear_attention"] * 3, FULL] * 6,
    },
    "qwen3.5-35b-a3b": DELTA
    | MANY
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "qwen3-next-80b-a3b": DELTA
    | MANY
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 5120,
        "vocab_size": 151_936,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 2048,
        "block_ff_dim": 12_288,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", FULL] * 2,
    },
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": 100_352,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "tie_word_embeddings": True,
        "layer_types": [*["mamba"] * 5, "attention"],
    },
    "nemotron-nano-9b-v2": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131_072,
        "hidden_size": 4480,
        "intermediate_size": 15_680,
        "hybrid_override_pattern": "M-M-M*-",
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "n_groups": 8,
        "num_hidden_layers": 7,
    },
    "nemotron-3-nano-30b-a3b": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131_072,
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "hybrid_override_pattern": "MEM*E",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_hidden_layers": 5,
    },
    "falcon-h1-1.5b": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "vocab_size": 65_536,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
    },
}
"""Sizes of a layer as published (31B: approximately), with as many of the layers as 8 GB hold."""

SEQUENCES, LONGEST = 4, 8192


def write_model(name: str, folder: Path) -> Path:
    """The folder of a model without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "max_position_embeddings": 131_072,
    }
    config |= MODELS[name]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(4096)))
    return folder


@contextmanager
def most_used() -> Iterator[list[int]]:
    """The most resident and anonymous memory of this process in bytes, once it has ended."""
    most, ended = [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            most[:] = map(max, most, used())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield most
    finally:
        ended.set()
        watching.join()


def used() -> tuple[int, int]:
    """Resident and anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmRSS"].split()[0]) << 10, int(fields["RssAnon"].split()[0]) << 10


def measure(
    name: str, folder: Path, tokens: int, sequences: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Plan and use of one model, in this process."""
    from headrace.core.request import SamplingParams
    from headrace.llm import LLM

    draws = random.Random(0)
    sizes: dict[str, Any] = {
        "max_model_len": LONGEST,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens,
    }
    with (
        most_used() as most,
        LLM(str(folder), load_format="dummy", device="cpu", **sizes, **options) as llm,
    ):
        loading, most[:] = most[0], used()
        plan = llm.loaded.ledger
        length = min(max(tokens, LONGEST // 8), plan.kv_tokens // sequences)
        sampled = SamplingParams(max_tokens=32, temperature=1.0, top_p=0.95, ignore_eos=True)
        for _ in range(2):
            prompts = [[draws.randrange(300, 4000) for _ in range(length - 40)] for _ in range(sequences)]
            llm.generate(prompts, sampled, progress=False)
        time.sleep(1)
    return {
        "model": name,
        **options,
        "layers": MODELS[name]["num_hidden_layers"],
        "weights": plan.weight_bytes,
        "activations": plan.activation_bytes,
        "kv": plan.kv_bytes,
        "window_groups": plan.windows.groups,
        "libraries": plan.process_bytes,
        "planned": plan.total_bytes,
        "states": plan.states_bytes,
        "used_while_loading": loading,
        "used": most[0],
        "anonymous": most[1],
    }


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--home", type=Path, default=None, help="keep the folders of the models here")
    parser.add_argument("--kv-cache-memory-bytes", default="128MiB")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=SEQUENCES)
    parser.add_argument("--only-write", action="store_true", help="write the folders and measure nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    tokens = given.max_num_batched_tokens
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.models:
            folder = write_model(name, (given.home or Path(temporary)) / name)
            options = {"kv_cache_memory_bytes": given.kv_cache_memory_bytes}
            options |= {} if given.quantization is None else {"quantization": given.quantization}
            if given.here:
                print(json.dumps(measure(name, folder, tokens, given.max_num_seqs, options)))
            elif not given.only_write:
                _report(name, folder, tokens, given.max_num_seqs, options)


def _report(name: str, folder: Path, tokens: int, sequences: int, options: Mapping[str, Any]) -> None:
    options = {**options, "max_num_batched_tokens": tokens, "max_num_seqs": sequences}
    flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory_plan",
        name,
        "--home",
        str(folder.parent),
        "--here",
        *flags,
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
    found = json.loads(done.stdout.splitlines()[-1])
    parts = {
        key: f"{found[key] / 1e6:,.0f} MB" for key in ("weights", "activations", "states", "kv", "libraries")
    }
    print(
        f"{name}, {found['layers']} layers, {found['window_groups']} window groups: planned"
        f" {found['planned'] / 1e6:,.0f} MB ({', '.join(f'{key} {value}' for key, value in parts.items())}), used"
        f" {found['used'] / 1e6:,.0f} MB, {found['planned'] / found['used']:.3f} x"
        f" ({found['anonymous'] / 1e6:,.0f} MB anonymous);"
        f" {found['used_while_loading'] / 1e6:,.0f} MB while loading"
    )


if __name__ == "__main__":
    main()
