"""The forward pass of encoders of BERT's shape (arXiv:1810.04805): RoBERTa, XLM-R, DistilBERT, MPNet.

It uses only a few dozen torch calls, because for one short text the calls cost as much as the arithmetic. `layers`
yields after each layer, so that other work can run in between.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.encoder.families import FAMILIES, LayerNames
from headrace.compute.encoder.packed import Packed, attend
from headrace.compute.encoder.spec import EncoderSpec
from headrace.compute.encoder.tensors import Linear, Norm, Tensors

WORDS = "embeddings.word_embeddings.weight"
_BUCKETS, _FARTHEST = 32, 128


class _Layer(NamedTuple):
    qkv: Linear
    attended: Linear
    attended_norm: Norm
    up: Linear
    down: Linear
    down_norm: Norm


class Bert:
    """An encoder with the sizes ``spec`` and the weights ``of`` a checkpoint.

    Raises:
        ModelError: a tensor is missing or does not have the shape in ``spec``.
    """

    def __init__(self, spec: EncoderSpec, of: Tensors) -> None:
        self.spec = spec
        self.device = of.device
        family = FAMILIES[spec.family]
        hidden, rows = spec.hidden_size, spec.first_position + spec.max_tokens
        self._words = of.get(WORDS, spec.vocab_size, hidden)
        positions = of.get("embeddings.position_embeddings.weight", rows, hidden)[spec.first_position :]
        self._second: Tensor | None = None
        kinds = "embeddings.token_type_embeddings.weight"
        if family.typed and of.has(kinds):
            types = of.table(kinds, hidden)
            # Most tokens have type 0, so its embedding is added to the position embeddings once.
            positions = positions + types[0]
            self._second = types[1] - types[0] if len(types) > 1 else None
        self._positions = positions
        self._embedding_norm = of.norm("embeddings.LayerNorm", hidden, spec.norm_eps)
        self._layers = [
            _layer(of, spec, family.names, family.names.layer.format(index))
            for index in range(spec.num_layers)
        ]
        self._distances = (
            of.get("encoder.relative_attention_bias.weight", _BUCKETS, spec.num_heads)
            if family.relative
            else None
        )

    @torch.inference_mode()
    def layers(self, rows: Packed) -> Generator[None, None, Tensor]:
        """Compute the last hidden states [T, hidden] of packed rows; yields after each layer."""
        x = self._words[rows.tokens] + self._positions[rows.positions]
        if self._second is not None and bool(rows.second.any()):
            x += rows.second[:, None] * self._second
        x = self._embedding_norm(x)
        bias = None if self._distances is None else _bias(self._distances, max(rows.lengths))
        for layer in self._layers:
            yield
            qkv = layer.qkv(x).view(len(x), 3, self.spec.num_heads, -1)
            x = layer.attended_norm(layer.attended(attend(qkv, rows.groups, bias)).add_(x))
            x = layer.down_norm(layer.down(F.gelu(layer.up(x))).add_(x))
        return x


def _layer(of: Tensors, spec: EncoderSpec, names: LayerNames, prefix: str) -> _Layer:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = (f"{prefix}{name}" for name in (names.query, names.key, names.value))
    return _Layer(
        qkv=of.linear(hidden, hidden, *qkv),
        attended=of.linear(hidden, hidden, prefix + names.attended),
        attended_norm=of.norm(prefix + names.attended_norm, hidden, spec.norm_eps),
        up=of.linear(inner, hidden, prefix + names.up),
        down=of.linear(hidden, inner, prefix + names.down),
        down_norm=of.norm(prefix + names.down_norm, hidden, spec.norm_eps),
    )


def _bias(distances: Tensor, length: int) -> Tensor:
    """The bias [heads, L, L] of each query and key by their distance, as in T5 (arXiv:1910.10683).

    Half of the buckets are for keys after the query. Near distances have a bucket each, far ones share them by their
    logarithm.
    """
    at = torch.arange(length, device=distances.device)
    ahead = at[None, :] - at[:, None]
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    far = ahead.abs()
    scaled = torch.log(far.clamp(min=1).float() / exact) / math.log(_FARTHEST / exact) * (half - exact)
    shared = (exact + scaled.long()).clamp(max=half - 1)
    buckets = torch.where(far < exact, far, shared) + half * (ahead > 0)
    return distances[buckets].permute(2, 0, 1).contiguous()
