"""Folders of LoRA adapters with random weights, as PEFT writes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def config_of(**changed: Any) -> dict[str, Any]:
    """The settings of an adapter."""
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    return plain | {"target_modules": [*ATTENTION, *MLP], "lora_dropout": 0.05} | changed


def sizes_of(model: Any, names: tuple[str, ...] = (*ATTENTION, *MLP)) -> dict[str, tuple[int, int]]:
    """The linear modules of a model of transformers that end with one of the names, and their sizes [out, in]."""
    found = model.named_modules()
    return {
        name: tuple(each.weight.shape)
        for name, each in found
        if name.rpartition(".")[2] in names and hasattr(each, "weight")
    }


def write_adapter(
    folder: Path, sizes: Mapping[str, tuple[int, int]], seed: int = 0, size: float = 0.5, **changed: Any
) -> Path:
    """An adapter that changes the modules of ``sizes`` by random products of about ``size`` per weight's root."""
    config = config_of(**changed)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, (outputs, inputs) in sizes.items():
        rank = pattern_of(config.get("rank_pattern", {}), module, config["r"])
        down = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        up = size * torch.randn(outputs, rank, generator=generator) / math.sqrt(rank)
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    return write_files(folder, config, tensors)


def write_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """An adapter of these settings and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def pattern_of(values: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that names the end of a module."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def changes_of(folder: Path) -> dict[str, Tensor]:
    """What an adapter adds to the weight of each module: the product of its tensors, with their scale."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, changes = load_file(folder / "adapter_model.safetensors"), {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            alpha = pattern_of(config.get("alpha_pattern", {}), module, config["lora_alpha"])
            rank = math.sqrt(len(down)) if config.get("use_rslora") else len(down)
            up = tensors[name.replace("lora_A", "lora_B")]
            changes[module] = (alpha / rank) * (up.double() @ down.double())
    return changes


@torch.no_grad()
def merge(model: Any, folder: Path, sign: int = 1) -> None:
    """Add an adapter to the weights of a model of transformers, or take it away again."""
    for module, change in changes_of(folder).items():
        weight = model.get_submodule(module).weight
        weight.copy_((weight.double() + sign * change).to(weight.dtype))
