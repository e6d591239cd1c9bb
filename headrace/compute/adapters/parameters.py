"""Changes of parameters that hold the experts of a layer (``target_parameters``), as PEFT stores them.

PEFT wraps a parameter as one linear layer whose rank is divided between the experts. Of two parameters of a module, the
wrapper of the second holds that of the first:

```
 …mlp.experts.base_layer.lora_A.weight  [experts * rank, inputs]    gate_up_proj
 …mlp.experts.base_layer.lora_B.weight  [outputs, rank * experts]
 …mlp.experts.lora_A.weight             …                           down_proj; or gate_up_proj, if it is alone
```
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.compute.adapters.config import CONFIG, AdapterConfig
from headrace.compute.adapters.layout import AdapterLayout, Fused
from headrace.compute.checkpoint import listed
from headrace.compute.kernels.adapters import of_expert
from headrace.compute.model.weights import plain_name
from headrace.core.adapters import AdapterError

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

_WRAPPED = ".base_layer"
_SWAPPED = (0, 19)
"""The version of PEFT since which the first matrix has the inputs of a parameter [experts, outputs, inputs] too."""
_BLOCKS = ("mlp", "block_sparse_moe")
"""Where transformers has the experts, whatever a checkpoint calls the module."""


class Changed(NamedTuple):
    """What an expert's linear layer ``name`` gets: ``down`` [rank, inputs], ``up`` [outputs, rank] with the scale."""

    layer: int
    name: str
    down: Tensor
    up: Tensor


def take_parameters(
    tensors: dict[str, Tensor], layout: AdapterLayout, config: AdapterConfig, max_rank: int
) -> list[Changed]:
    """The changes of parameters, whose tensors are removed from ``tensors``.

    Raises:
        AdapterError: a parameter that the config names does not exist, or its tensors are missing or of another shape.
    """
    if not config.parameters:
        return []
    stored = {plain_name(name.removeprefix(PREFIX)): name for name in tensors}
    found: list[Changed] = []
    named: set[str] = set()
    for module in dict.fromkeys(each.module for each in layout.fused):
        fused = [each for each in layout.fused if each.module == module]
        wanted = {path: [each for each in fused if _targets(path, each, config)] for path in _paths(module)}
        paths = [path for path, each in wanted.items() if each]
        if not paths:
            continue
        path = next((each for each in paths if f"{each}{DOWN}" in stored), paths[0])
        named.update(target for each in wanted[path] for target in _targets(path, each, config))
        found += _of_module(tensors, stored, path, wanted[path], config, max_rank)
    if missing := sorted(set(config.parameters) - named):
        raise AdapterError(
            f"{CONFIG}: target_parameters: {layout.architecture} has no parameters {listed(missing)} that adapters can"
            " change"
        )
    return found


def _paths(module: str) -> list[str]:
    """The names that a module of experts may have."""
    block = module.removesuffix(".experts").rpartition(".")[2]
    others = (module.replace(f".{block}.", f".{other}.") for other in _BLOCKS if other != block)
    return [module, *others]


def _targets(path: str, fused: Fused, config: AdapterConfig) -> list[str]:
    """What names a parameter among the targets."""
    name = f"{path}.{fused.name}"
    return [each for each in config.parameters if name == each or name.endswith(f".{each}")]


def _of_module(
    tensors: dict[str, Tensor],
    stored: dict[str, str],
    path: str,
    wanted: list[Fused],
    config: AdapterConfig,
    max_rank: int,
) -> Iterator[Changed]:
    for number, each in enumerate(wanted):
        wrapped = path + (len(wanted) - 1 - number) * _WRAPPED
        pair = []
        for end in (DOWN, UP):
            name = stored.get(wrapped + end)
            if name is None:
                raise AdapterError(f"{WEIGHTS} lacks {wrapped}{end}, the change of {each.name}")
            pair.append(tensors.pop(name))
        yield from _of_experts(each, f"{path}.{each.name}", pair[0], pair[1], config, max_rank)


def _of_experts(
    each: Fused, name: str, first: Tensor, second: Tensor, config: AdapterConfig, max_rank: int
) -> Iterator[Changed]:
    rank, experts = config.rank_of(name), each.experts
    if rank > max_rank:
        raise AdapterError(f"{name} has the rank {rank}, which is above --max-lora-rank {max_rank}")
    shapes = {
        (True, rank * experts, each.inputs, each.outputs),
        (False, rank * experts, each.outputs, each.inputs),
    }
    given = (*first.shape, *second.shape)
    fits = [
        straight
        for straight, ranks, inner, outer in shapes
        if given == (ranks, inner, outer, ranks) and (straight or not each.turned)
    ]
    if not fits or not (first.is_floating_point() and second.is_floating_point()):
        raise AdapterError(
            f"{WEIGHTS}: the change of {name} has the shapes {list(first.shape)} and {list(second.shape)}; this model"
            f" and the rank need {[rank * experts, each.inputs]} and {[each.outputs, rank * experts]}"
        )
    if len(fits) > 1 and config.version is None:
        raise AdapterError(
            f"{CONFIG}: peft_version is missing, and {name} is square: which matrix has its inputs depends on the"
            " version"
        )
    straight = fits[0] if len(fits) == 1 else config.version is not None and config.version >= _SWAPPED
    downs = first.view(experts, rank, -1)
    ups = second.view(-1, rank, experts).permute(2, 0, 1)
    if not straight:
        downs, ups = ups.transpose(1, 2), downs.transpose(1, 2)
    ups = ups.float() * config.scale_of(name)
    if each.turned and each.linear == "gate_up":
        ups = torch.cat((ups[:, 0::2], ups[:, 1::2]), 1)
    for expert in range(experts):
        linear = of_expert(each.linear, expert)
        yield Changed(each.layer, linear, downs[expert].contiguous(), ups[expert].contiguous())
