"""The files of sentence-transformers in a model's folder: pooling, prompts, and the longest input.

It reads JSON only. A folder without these files is used with the defaults of its kind of model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.encoder.pooling import Dense
from headrace.compute.encoder.tensors import Tensors, read_tensors
from headrace.compute.kernels import Kernels
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.spec import ModelError
from headrace.files import read_json_file

_MODES = {
    "cls_token": "cls",
    "cls": "cls",
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
    "last": "last",
}
"""Names of pooling modes in older and newer files."""

_ACTIVATIONS = {"Tanh": torch.tanh, "Identity": lambda x: x, "GELU": F.gelu, "ReLU": F.relu}


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A linear layer after pooling, in a folder of its own."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str

    def read(self, kernels: Kernels, device: torch.device) -> Dense:
        """Load its weights.

        Raises:
            ModelError: a tensor is missing or has another shape.
        """
        of = Tensors(read_tensors(self.folder), "linear.", kernels, device)
        weight = of.get("weight", self.outputs, self.inputs)
        bias = of.get("bias", self.outputs) if self.bias else None

        def linear(x: Tensor) -> Tensor:
            return F.linear(x, weight, bias)

        return Dense(linear, _ACTIVATIONS[self.activation])


@dataclass(frozen=True, slots=True)
class Sentence:
    """How a folder's texts become vectors.

    ``max_tokens`` is the longest input that it was trained for (None: the model's limit). ``prompts`` are texts to put
    before an input, by name; ``default_prompt`` names the one to use if a request names none.
    """

    pooling: str
    normalize: bool
    dense: tuple[DenseFile, ...] = ()
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence(folder: Path, pooling: str) -> Sentence:
    """What the files of a folder say. Without ``modules.json``: ``pooling``, and vectors of length one.

    Raises:
        ModelError: a file is damaged, or names something that is not supported.
    """
    limits = _object(folder / "sentence_bert_config.json")
    normalize, dense = True, list[DenseFile]()
    modules = _list(folder / "modules.json")
    if modules:
        normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = folder / str(module.get("path", ""))
        if kind == "Pooling":
            pooling = _pooling(folder, _object(path / "config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind != "Transformer":
            raise ModelError(f"{folder}: a module {kind!r} after the encoder is not supported")
    prompts, default = _prompts(folder / "config_sentence_transformers.json")
    return Sentence(
        pooling,
        normalize,
        tuple(dense),
        ConfigReader("sentence_bert_config.json", limits, {}).optional_integer("max_seq_length"),
        limits.get("do_lower_case") is True,
        prompts,
        default,
    )


def _pooling(folder: Path, config: Mapping[str, Any]) -> str:
    prefix = "pooling_mode_"
    chosen = [
        name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True
    ]
    if config.get("pooling_mode"):
        named = config["pooling_mode"]
        chosen = [str(each) for each in (named if isinstance(named, list) else [named])]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        shown = ", ".join(sorted(chosen)) or "none"
        raise ModelError(f"{folder}: pooling {shown} is not supported, only cls, mean or lasttoken")
    if config.get("include_prompt") is False:
        raise ModelError(
            f"{folder}: include_prompt false is not supported: prompts are pooled like other tokens"
        )
    return _MODES[chosen[0]]


def _dense(path: Path) -> DenseFile:
    config = _object(path / "config.json")
    read = ConfigReader(f"module 'Dense' in {path}", config, {})
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {activation} is not supported")
    return DenseFile(
        path,
        read.integer("in_features"),
        read.integer("out_features"),
        config.get("bias") is not False,
        activation,
    )


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    config = _object(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of texts")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {default!r} is not among the prompts")
    return prompts, default


def _list(path: Path) -> list[dict[str, Any]]:
    value = _json(path, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ModelError(f"{path} is not a list of JSON objects")
    return value


def _object(path: Path) -> dict[str, Any]:
    value = _json(path, {})
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _json(path: Path, missing: Any) -> Any:
    if not path.is_file():
        return missing
    try:
        return read_json_file(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
