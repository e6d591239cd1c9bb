"""The forward pass of ModernBERT (arXiv:2412.13663): norms before the layers, rotary positions, local attention."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.encoder.packed import Packed, attend
from headrace.compute.encoder.spec import EncoderSpec, RotaryLayer
from headrace.compute.encoder.tensors import Linear, Norm, Tensors

WORDS = "embeddings.tok_embeddings.weight"


class _Layer(NamedTuple):
    kind: RotaryLayer
    norm: Norm | None
    qkv: Linear
    attended: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


class ModernBert:
    """An encoder with the sizes ``spec`` and the weights ``of`` a checkpoint.

    Raises:
        ModelError: a tensor is missing or does not have the shape in ``spec``.
    """

    def __init__(self, spec: EncoderSpec, of: Tensors) -> None:
        self.spec = spec
        self.device = of.device
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._words = of.get(WORDS, spec.vocab_size, hidden)

        def norm(name: str) -> Norm:
            return of.norm(name, hidden, spec.norm_eps, bias=False)

        def linear(name: str, outputs: int, inputs: int) -> Linear:
            return of.linear(outputs, inputs, name, bias=False)

        self._embedding_norm = norm("embeddings.norm")
        self._final_norm = norm("final_norm")
        self._layers = [
            _Layer(
                kind=kind,
                norm=norm(f"layers.{index}.attn_norm") if index else None,
                qkv=linear(f"layers.{index}.attn.Wqkv", 3 * hidden, hidden),
                attended=linear(f"layers.{index}.attn.Wo", hidden, hidden),
                mlp_norm=norm(f"layers.{index}.mlp_norm"),
                up=linear(f"layers.{index}.mlp.Wi", 2 * inner, hidden),
                down=linear(f"layers.{index}.mlp.Wo", hidden, inner),
            )
            for index, kind in enumerate(spec.layers)
        ]

    @torch.inference_mode()
    def layers(self, rows: Packed) -> Generator[None, None, Tensor]:
        """Compute the last hidden states [T, hidden] of packed rows; yields after each layer."""
        x = self._embedding_norm(self._words[rows.tokens])
        rotations = {
            layer.kind.theta: self._rotation(rows.positions, layer.kind.theta) for layer in self._layers
        }
        for layer in self._layers:
            yield
            qkv = layer.qkv(x if layer.norm is None else layer.norm(x))
            qkv = qkv.view(len(x), 3, self.spec.num_heads, -1)
            _rotate(qkv[:, :2], rotations[layer.kind.theta])
            x = layer.attended(attend(qkv, rows.groups, reach=layer.kind.reach)).add_(x)
            inner, gate = layer.up(layer.mlp_norm(x)).chunk(2, -1)
            x = layer.down(F.gelu(inner) * gate).add_(x)
        return self._final_norm(x)

    def _rotation(self, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, 1, half a head]."""
        size = self.spec.head_dim
        each = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
        angles = (positions[:, None].float() * theta ** (-each / size))[:, None, None, :]
        return angles.cos(), angles.sin()


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
    """Rotate heads [T, n, heads, size] in place (arXiv:2104.09864)."""
    cos, sin = rotation
    first, second = heads.chunk(2, -1)
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)
