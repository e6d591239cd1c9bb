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


def experts_of(model: Any) -> dict[str, Any]:
    """The modules of a model of transformers whose parameters hold the experts of a layer."""
    return {name: each for name, each in model.named_modules() if hasattr(each, "gate_up_proj")}


def sizes_of_experts(model: Any) -> dict[str, tuple[int, int]]:
    """The linear modules of experts where each is a module, and their sizes [out, in]."""
    sizes = {}
    for name, each in experts_of(model).items():
        for expert in range(len(each.down_proj)):
            hidden, inner = each.down_proj[expert].shape
            of = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
            sizes |= {f"{name}.{expert}.{linear}": size for linear, size in of.items()}
    return sizes


def fused_tensors(model: Any, rank: int, seed: int, *, swapped: bool = True) -> dict[str, Tensor]:
    """Random changes of the parameters of all experts, as PEFT stores them; ``swapped``: since its version 0.19."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, each in experts_of(model).items():
        for wrapped, parameter in ((".base_layer", each.gate_up_proj), ("", each.down_proj)):
            count, second, third = parameter.shape
            inputs, outputs = (third, second) if swapped and not _is_turned(each) else (second, third)
            down = torch.randn(rank * count, inputs, generator=generator) / math.sqrt(inputs)
            up = 0.5 * torch.randn(outputs, rank * count, generator=generator) / math.sqrt(rank)
            stem = f"base_model.model.{name}{wrapped}"
            tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    return tensors


def _is_turned(experts: Any) -> bool:
    return bool(getattr(experts, "is_transposed", False))


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
    config = json.loads((folder / "adapter_config.json").read_text())
    if config.get("target_parameters"):
        _merge_fused(model, config, load_file(folder / "adapter_model.safetensors"), sign)
        return
    for module, change in changes_of(folder).items():
        weight = _weight_of(model, module)
        weight.copy_((weight.double() + sign * change).to(weight.dtype))


def _weight_of(model: Any, module: str) -> Tensor:
    """The weight of a module, which may be an expert's: then a part of the parameter of all."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", module)
    if found is None:
        weight: Tensor = model.get_submodule(module).weight
        return weight
    experts, number = model.get_submodule(found[1]), int(found[2])
    if found[3] == "down":
        return experts.down_proj[number]
    both: Tensor = experts.gate_up_proj[number]
    return both.chunk(2)[found[3] == "up"]


def _merge_fused(model: Any, config: Mapping[str, Any], tensors: Mapping[str, Tensor], sign: int) -> None:
    """The arithmetic of `peft`'s wrapper of parameters."""
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    swapped = config.get("peft_version", "0.19") >= "0.19"
    for name, each in experts_of(model).items():
        for wrapped, parameter in ((".base_layer", each.gate_up_proj), ("", each.down_proj)):
            stem, count = f"base_model.model.{name}{wrapped}", len(parameter)
            down, up = (tensors[f"{stem}.lora_{which}.weight"].double() for which in "AB")
            down, up = down.view(count, -1, down.shape[-1]), up.view(len(up), -1, count)
            order = "eoi" if swapped and not _is_turned(each) else "eio"
            change = scale * torch.einsum(f"ore,eri->{order}", up, down)
            parameter.copy_((parameter.double() + sign * change).to(parameter.dtype))
