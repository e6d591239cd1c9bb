"""Linear layers that a checkpoint stores quantized, for a model of another library.

`quantization.formats` says how each is stored. They are found by the path of their module in the model, which is its
name in the checkpoint; a model whose tensors are renamed or merged when they are loaded is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.compute.checkpoint import Checkpoint, ModelError, listed
from headrace.compute.model.layout import parts_of, read_linear
from headrace.compute.quantization.formats import read_format
from headrace.compute.quantization.scheme import StoredFormat
from headrace.compute.quantization.weight import QuantizedWeight


class StoredLinears(NamedTuple):
    """The weights by path, and the names of all tensors in the checkpoint that they are made of."""

    weights: Mapping[str, QuantizedWeight]
    names: frozenset[str]


def take_format(config: Any) -> StoredFormat | None:
    """The format of a checkpoint by its config, from which it is taken; None: its linears are plain.

    Raises:
        ModelError: the format is not supported.
    """
    for part in (config, config.get_text_config()):
        described = getattr(part, "quantization_config", None)
        if described:
            del part.quantization_config  # the other library would look for its own kernels
            fields = described if isinstance(described, Mapping) else described.to_dict()
            return read_format(fields)
    return None


def read_stored(folder: Path, model: nn.Module, stored: StoredFormat) -> StoredLinears:
    """Give linears that are stored quantized their dequantized weights, and return the weights as stored.

    A weight that can only be computed dequantized is not among them.

    Raises:
        ModelError: tensors are missing or do not fit.
    """
    weights: dict[str, QuantizedWeight] = {}
    names: set[str] = set()
    with Checkpoint(folder, str) as checkpoint, torch.no_grad():
        for path, module in model.named_modules():
            layout = stored.layout_of(path) if isinstance(module, nn.Linear) else None
            if layout is None or not isinstance(module, nn.Linear):
                continue
            found = parts_of(checkpoint, layout, path)
            missing = [f"{path}.{each}" for each in layout.required if each not in found]
            if missing:
                raise ModelError(f"{folder} is stored as {stored.name}, and lacks {listed(missing)}")
            weight = read_linear(checkpoint, layout, path, (module.out_features, module.in_features))
            names.update(found.values(), {f"{path}.weight"})
            if module.bias is None and f"{path}.bias" in checkpoint.names:
                if checkpoint.read(f"{path}.bias").any():
                    raise ModelError(f"{folder} has {path}.bias, which the model does not use")
                names.add(f"{path}.bias")  # some writers add zeros
            if isinstance(weight, QuantizedWeight):
                weights[path] = weight
                weight = weight.dequantized()
            module.weight.copy_(weight)
    return StoredLinears(weights, frozenset(names))
