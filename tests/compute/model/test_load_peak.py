"""The most memory that a model takes while it is loaded and packed, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.forks import run_forked

GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 512,
    "vocab_size": 49152,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}

MANY_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 512,
    "vocab_size": 9536,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from headrace.compute.device import freeing_at_once
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.weights import dummy_weights

def most():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10

spec = parse_config(json.loads(sys.argv[1]))
small = parse_config(json.loads(sys.argv[1]) | {"vocab_size": 64, "num_hidden_layers": 1})
kernels = CppKernels()
with freeing_at_once():
    for each in (small, spec):  # the first brings what torch needs once
        Path("/proc/self/clear_refs").write_text("5")  # counts the most from now on
        before = most()
        weights = dummy_weights(each, torch.bfloat16, "cpu", quantize=sys.argv[2])
        decoder = Decoder(each, weights, kernels, 64)
print(most() - before, decoder.nbytes, weights.embedding.nbytes)
"""


def _loaded(config: dict[str, Any], quantize: str | None) -> tuple[int, int, int]:
    """The most bytes that were taken, those of the weights, and those of the table."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the operating system does not count")
    program = PROGRAM.replace("sys.argv[1]", repr(json.dumps(config))).replace("sys.argv[2]", repr(quantize))
    done = run_forked("-c", program)
    assert done.returncode == 0, done.stderr
    taken, weights, table = map(int, done.stdout.split())
    return taken, weights, table


@pytest.mark.slow
def test_loading_takes_little_more_than_the_weights() -> None:
    """The head as large as the table, a quarter of the weights, is not held beside its plain copy."""
    taken, weights, head = _loaded(GPT_OSS, None)
    assert weights > 3.5 * head > 150 << 20
    assert 0.95 * weights < taken < weights + 0.6 * head


@pytest.mark.slow
def test_small_parts_of_experts_are_returned_layer_by_layer() -> None:
    """Scales of an expert are smaller than what the C library returns as soon as it is freed.

    Zero points are packed as bytes: in float32 they took 1.076 times the weights.
    """
    taken, weights, _ = _loaded(MANY_EXPERTS, "int4")
    assert 0.95 * weights < taken < 1.07 * weights
