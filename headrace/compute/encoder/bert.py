"""The forward pass of BERT-like encoders (arXiv:1810.04805), with weights from safetensors.

It uses only a few dozen torch calls, because for one short question the calls cost as much as the arithmetic. It
knows tensors and shapes, not text; `sentences` tokenizes, pools and normalizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.compute.kernels import Kernels, select
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.spec import ModelError

_FAMILIES = {"bert": False, "roberta": True, "xlm-roberta": True}
"""Supported model types, and whether positions are counted from after the padding id."""


@dataclass(frozen=True, slots=True)
class BertSpec:
    """Sizes in elements; ``first_position`` is the row of the position table for the first token."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    norm_eps: float
    first_position: int


def parse_bert_config(config: Mapping[str, Any]) -> BertSpec:
    """The sizes in a ``config.json``.

    Raises:
        ModelError: the encoder is of another kind, or a field is missing or not supported.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ModelError(f"encoder type {family!r} is not supported; supported are {', '.join(_FAMILIES)}")
    read = ConfigReader(family, config, {"position_embedding_type": "absolute"})
    if read.get("hidden_act") != "gelu":
        raise ModelError(f"{family}: hidden_act {read.get('hidden_act')!r} is not supported, only gelu")
    if read.get("position_embedding_type") not in ("absolute", None):
        raise ModelError(f"{family}: only absolute positions are supported")
    padding = 0 if read.get("pad_token_id") is None else read.count("pad_token_id")
    first = padding + 1 if _FAMILIES[family] else 0
    return BertSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=read.integer("num_attention_heads"),
        max_tokens=read.integer("max_position_embeddings") - first,
        norm_eps=read.number("layer_norm_eps"),
        first_position=first,
    )


class _Linear(NamedTuple):
    kernels: Kernels
    weight: Any  # as the kernels prepared it
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)


class _Norm(NamedTuple):
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class _Layer(NamedTuple):
    qkv: _Linear
    attended: _Linear
    attended_norm: _Norm
    up: _Linear
    down: _Linear
    down_norm: _Norm


class Bert:
    """An encoder with the sizes ``spec`` and the weights ``tensors``, with Hugging Face names (any common prefix).

    Raises:
        ModelError: a tensor is missing or does not have the shape in ``spec``.
    """

    def __init__(self, spec: BertSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec = spec
        anchor = "embeddings.word_embeddings.weight"
        prefix = next((name[: -len(anchor)] for name in tensors if name.endswith(anchor)), "")

        def get(name: str, *shape: int) -> Tensor:
            tensor = tensors.get(prefix + name)
            if tensor is None:
                raise ModelError(f"the encoder's weights lack {prefix + name}")
            if tensor.shape != shape:
                raise ModelError(f"{prefix + name} is {list(tensor.shape)}, the config says {list(shape)}")
            return tensor.float()

        def norm(name: str) -> _Norm:
            return _Norm(get(f"{name}.weight", hidden), get(f"{name}.bias", hidden), spec.norm_eps)

        def linear(name: str, outputs: int, inputs: int) -> _Linear:
            weight = kernels.prepare_linear(get(f"{name}.weight", outputs, inputs))
            return _Linear(kernels, weight, get(f"{name}.bias", outputs))

        def qkv(name: str) -> _Linear:
            parts = [f"{name}.{part}" for part in ("query", "key", "value")]
            weight = torch.cat([get(f"{part}.weight", hidden, hidden) for part in parts])
            bias = torch.cat([get(f"{part}.bias", hidden) for part in parts])
            return _Linear(kernels, kernels.prepare_linear(weight), bias)

        kernels = select("auto", torch.device("cpu"))
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._words = get(anchor, spec.vocab_size, hidden)
        positions = get(
            "embeddings.position_embeddings.weight", spec.first_position + spec.max_tokens, hidden
        )
        types = tensors.get(prefix + "embeddings.token_type_embeddings.weight")
        # Every token is of the first type: its embedding is part of the positions'.
        self._positions = positions[spec.first_position :] + (0 if types is None else types[0].float())
        self._embedding_norm = norm("embeddings.LayerNorm")
        self._layers = [
            _Layer(
                qkv=qkv(f"encoder.layer.{index}.attention.self"),
                attended=linear(f"encoder.layer.{index}.attention.output.dense", hidden, hidden),
                attended_norm=norm(f"encoder.layer.{index}.attention.output.LayerNorm"),
                up=linear(f"encoder.layer.{index}.intermediate.dense", inner, hidden),
                down=linear(f"encoder.layer.{index}.output.dense", hidden, inner),
                down_norm=norm(f"encoder.layer.{index}.output.LayerNorm"),
            )
            for index in range(spec.num_layers)
        ]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Last hidden states [B, T, hidden] of ``tokens`` [B, T]; ``mask`` [B, T] is False on padding."""
        rows, length = tokens.shape
        heads = self.spec.num_heads
        x = self._words[tokens] + self._positions[:length]
        x = self._embedding_norm(x).flatten(0, 1)
        attended_to = None if mask is None else mask[:, None, None, :]
        for layer in self._layers:
            qkv = layer.qkv(x).view(rows, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=attended_to)
            x = layer.attended_norm(layer.attended(attended.transpose(1, 2).reshape(len(x), -1)) + x)
            x = layer.down_norm(layer.down(F.gelu(layer.up(x))) + x)
        return x.view(rows, length, -1)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's ``model.safetensors``.

    Raises:
        ModelError: there is no such file (pickled weights are not opened), or it is damaged.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"{folder} contains no model.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
