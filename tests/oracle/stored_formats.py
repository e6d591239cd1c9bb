"""The formats of quantized checkpoints, and a checkpoint written again in one of them; it needs no transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compute.quantization import packing
from tests.compute.quantization.packing import Linear

GROUP = 16
Written = Callable[[tuple[int, int], int], tuple[dict[str, Tensor], Tensor]]
"""From a linear's shape and a seed: its tensors in a file, and the weight that they are."""


def in_few_bits(
    store: Callable[[Linear], dict[str, Tensor]],
    bits: int = 4,
    *,
    group: int | None = GROUP,
    symmetric: bool = False,
    mixed: bool = False,
) -> Written:
    def write(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
        # Inputs shared by linears that are computed as one are ordered alike, as their activations are the same.
        linear = Linear.draw(shape, bits, group or shape[1], symmetric=symmetric, mixed=False, seed=seed)
        if mixed:
            order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(shape[1]))
            linear.group_of = linear.group_of[order]
        return store(linear), linear.dense()

    return write


def in_fp8(scale: str, rows: int | None, columns: int | None) -> Written:
    def write(shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        high, wide = rows or shape[0], columns or shape[1]
        counts = (-(-shape[0] // high), -(-shape[1] // wide))
        scales = torch.rand(counts, generator=generator) * 0.2 + 0.1
        spread = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: shape[0], : shape[1]]
        parts = {"weight": weight, scale: scales, "input_scale": torch.tensor(0.5)}
        return parts, weight.float() * spread

    return write


def gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "damp_percent": 0.1, **more}


def compressed(stored: str, weights: dict[str, Any], activations: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


def integer(bits: int, strategy: str, symmetric: bool) -> dict[str, Any]:
    size = GROUP if strategy == "group" else None
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": size,
        "symmetric": symmetric,
        "observer": "minmax",
        "dynamic": False,
    }


def floating(strategy: str, block: list[int] | None = None) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "block_structure": block,
        "symmetric": True,
    }


FORMATS: dict[str, tuple[dict[str, Any], Written]] = {
    "gptq": (gptq(desc_act=False), in_few_bits(lambda x: packing.gptq(x, 1))),
    "gptq-symmetric": (gptq(sym=True), in_few_bits(lambda x: packing.gptq(x, 1), symmetric=True)),
    "gptq-desc-act": (gptq(desc_act=True), in_few_bits(lambda x: packing.gptq(x, 1), mixed=True)),
    "gptq-8": (gptq(8), in_few_bits(lambda x: packing.gptq(x, 1), 8)),
    "gptq-8-desc-act": (gptq(8, desc_act=True), in_few_bits(lambda x: packing.gptq(x, 1), 8, mixed=True)),
    "gptq-v2": (gptq(checkpoint_format="gptq_v2"), in_few_bits(lambda x: packing.gptq(x, 0))),
    "gptq-whole-rows": (gptq(group_size=-1), in_few_bits(lambda x: packing.gptq(x, 1), group=None)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        in_few_bits(packing.awq),
    ),
    "packed": (
        compressed("pack-quantized", integer(4, "group", True)),
        in_few_bits(lambda x: packing.pack_quantized(x, symmetric=True, ordered=False), symmetric=True),
    ),
    "packed-asymmetric-ordered": (
        compressed("pack-quantized", integer(4, "group", False)),
        in_few_bits(lambda x: packing.pack_quantized(x, symmetric=False, ordered=True), mixed=True),
    ),
    "packed-8-channel": (
        compressed("pack-quantized", integer(8, "channel", False)),
        in_few_bits(lambda x: packing.pack_quantized(x, symmetric=False, ordered=False), 8, group=None),
    ),
    "int8": (
        compressed("int-quantized", integer(8, "channel", False)),
        in_few_bits(lambda x: packing.int_quantized(x, symmetric=False), 8, group=None),
    ),
    "float8-channel": (compressed("float-quantized", floating("channel")), in_fp8("weight_scale", 1, None)),
    "float8-tensor": (compressed("naive-quantized", floating("tensor")), in_fp8("weight_scale", None, None)),
    "float8-block": (
        compressed("float-quantized", floating("block", [20, 16])),
        in_fp8("weight_scale", 20, 16),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [20, 20]},
        in_fp8("weight_scale_inv", 20, 20),
    ),
    "fp8-tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        in_fp8("weight_scale", None, None),
    ),
}
SPARED = "model.layers.1.mlp.down_proj"
SPARING = {"gptq": "modules_to_not_convert", "awq": "modules_to_not_convert", "fp8": "modules_to_not_convert"}


def rewrite(
    folder: Path, config: dict[str, Any], written: Written, linears: Iterable[str]
) -> dict[str, Tensor]:
    """Store the linears of these names so in a checkpoint; returns the weights that they are then, by parameter."""
    tensors = load_file(folder / "model.safetensors")
    weights: dict[str, Tensor] = {}
    for seed, name in enumerate(linears):
        rows, columns = tensors.pop(f"{name}.weight").shape
        parts, weights[f"{name}.weight"] = written((rows, columns), seed)
        tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return weights
