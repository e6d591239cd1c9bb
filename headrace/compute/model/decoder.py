"""The one decoder that all families share: packed rows in, logits of the wanted positions out.

Written for few operations per layer; every heavy one is a call of `Kernels`. Knows shapes and weights, nothing of
sequences, sampling or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import HeadShape, Kernels
from headrace.compute.kv import PagedKV
from headrace.compute.model.rope import rope_table
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Any
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer ready to run: weights as the kernels want them, window, which rope."""

    qkv: _Linear
    output: _Linear
    gate_up: _Linear
    down: _Linear
    input_norm: Tensor
    qk_norm: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    post_mlp_norm: Tensor | None
    window: int | None
    rope: int


class Decoder:
    """A model ready to run on one device.

    Args:
        spec: the model.
        weights: its weights, whose layers it takes over; their device and dtype are where and in what it computes.
        kernels: what computes.
        max_model_len: longest sequence that will be asked for; sizes the rotary tables.
    """

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, kernels: Kernels, max_model_len: int
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._embedding = weights.embedding
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        self._norm = weights.norm
        self._layers = tuple(
            self._prepare(weights.layers.pop(0), layer.window, layer.rope) for layer in spec.layers
        )
        self._head = kernels.prepare_linear(weights.head)
        self.nbytes = weights.nbytes
        if weights.head is weights.embedding and self._head is not weights.embedding:
            self.nbytes += (
                weights.embedding.nbytes
            )  # looked up by rows, and multiplied in a layout of its own
        self._ropes = tuple(rope_table(rope, max_model_len, self.device) for rope in spec.ropes)
        self._windows = frozenset(layer.window for layer in spec.layers)

    def _prepare(self, weights: LayerWeights, window: int | None, rope: int) -> _Layer:
        prepare = self.kernels.prepare_linear
        return _Layer(
            qkv=_Linear(prepare(weights.qkv), weights.qkv_bias),
            output=_Linear(prepare(weights.output), weights.output_bias),
            gate_up=_Linear(prepare(weights.gate_up), weights.gate_up_bias),
            down=_Linear(prepare(weights.down), weights.down_bias),
            input_norm=weights.input_norm,
            qk_norm=weights.qk_norm,
            post_attention_norm=weights.post_attention_norm,
            mlp_norm=weights.mlp_norm,
            post_mlp_norm=weights.post_mlp_norm,
            window=window,
            rope=rope,
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Write the batch's keys and values to ``kv``; float32 logits [S, vocab] of ``logits_indices``."""
        return self.logits(self.hidden(batch, kv))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [S, vocab] of hidden states [S, hidden]."""
        logits: Tensor = self.kernels.linear(hidden, self._head).float()
        if self.spec.logits_softcap is not None:
            logits.div_(self.spec.logits_softcap).tanh_().mul_(self.spec.logits_softcap)
        return logits

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """As `forward`, but the last hidden states [S, hidden], after the final norm."""
        kernels, spec, eps = self.kernels, self.spec, self.spec.norm_eps
        rotations = [table.index_select(0, batch.positions) for table in self._ropes]
        plans = {window: kernels.plan_attention(batch, window, self.dtype) for window in self._windows}

        residual = self._embedding.index_select(0, batch.tokens)
        if spec.embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = kernels.linear(x, layer.qkv.weight, layer.qkv.bias)
            pages = kv.layers[index]
            queries = kernels.rope_write_kv(
                qkv, self._heads, rotations[layer.rope], layer.qk_norm, eps, batch.slot_mapping, pages
            )
            x = kernels.paged_attention(
                queries, pages, plans[layer.window], spec.attention_scale, spec.attention_softcap
            )
            if index == last and len(batch.logits_indices) < len(batch.tokens):
                # Nobody attends to the last layer's output: only wanted positions go on.
                x, residual = x[batch.logits_indices], residual[batch.logits_indices]
            x = kernels.linear(x, layer.output.weight, layer.output.bias)
            if layer.post_attention_norm is not None:
                x = kernels.rms_norm(x, layer.post_attention_norm, eps)
            x, residual = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = kernels.linear(x, layer.gate_up.weight, layer.gate_up.bias)
            x = kernels.gated_activation(x, spec.activation)
            x = kernels.linear(x, layer.down.weight, layer.down.bias)
            if layer.post_mlp_norm is not None:
                x = kernels.rms_norm(x, layer.post_mlp_norm, eps)
            following = self._norm if index == last else self._layers[index + 1].input_norm
            x, residual = kernels.add_rms_norm(x, residual, following, eps)
        return x
