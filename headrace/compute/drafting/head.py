"""An EAGLE-3 head (arXiv:2503.01840): one layer that reads hidden states of the target and guesses what follows.

```
 position            p                                       p + 1
 target's states     a, b, c ─ fc ─► state                   (the head's own state, while it drafts)
 token               the one after p                         the one that was guessed
                     norm(token), norm(state) ─► attention ─► MLP ─► own state ─► norm ─► logits ─► next guess
```
The head's keys and values of position ``p`` belong to the token at ``p + 1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.compute.batch import Batch, Ints
from headrace.compute.kernels import HeadShape, Kernels
from headrace.compute.kv import PagedKV
from headrace.compute.model.rope import rope_table
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.transfer import upload


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head: the shape of its ``layer``, and the target's states that it reads.

    States are taken before these ``layers`` of the target; an index equal to the number of layers means the state after
    the last one. ``normed_residual``: the normed state, not the state, is the residual of the attention.
    """

    layer: DecoderSpec
    layers: tuple[int, ...]
    draft_vocab_size: int
    normed_residual: bool


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a head; linear weights are [out, in], norms float32.

    ``head`` None: the target's is used. ``names`` int64 are the tokens of its logits (None: all, in order).
    """

    embedding: Tensor
    combine: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    token_norm: Tensor
    state_norm: Tensor
    mlp_norm: Tensor
    norm: Tensor
    head: Tensor | None
    names: Ints | None


class Head:
    """A head that is ready to run: `drafting.forward.Decoder`, one pass at a time.

    Args:
        spec: its shape.
        weights: in the device and dtype of the computation.
        kernels: the backend.
        target_head: the target's head, as `Kernels.prepare_linear` made it; used without one of its own.
        own_bytes: memory of the weights that are not the target's.
        max_model_len: the longest sequence; sizes the rotary table.
    """

    def __init__(
        self,
        spec: HeadSpec,
        weights: HeadWeights,
        kernels: Kernels,
        target_head: Any,
        own_bytes: int,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.names = weights.names
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.nbytes = own_bytes
        self._kernels = kernels
        self._weights = weights
        prepare = kernels.prepare_linear
        self._combine, self._qkv, self._output = map(prepare, (weights.combine, weights.qkv, weights.output))
        self._gate_up, self._down = prepare(weights.gate_up), prepare(weights.down)
        self._head = target_head if weights.head is None else prepare(weights.head)
        self._rope = rope_table(spec.layer.ropes[0], max_model_len, self.device)
        self._shape = HeadShape(spec.layer.num_heads, spec.layer.num_kv_heads, spec.layer.head_dim)
        self._states = torch.empty(0)

    @property
    def state_width(self) -> int:
        """Width of the target's states of a token, all together."""
        return self._weights.combine.shape[1]

    def read(self, states: Tensor) -> None:
        """The next pass is on tokens with these ``states`` [T, state_width] of the target."""
        self._states = self._kernels.linear(states, self._combine)

    def follow(self, rows: Ints) -> None:
        """The next pass continues these of the last pass's wanted positions, with the head's own states."""
        if len(rows) != len(self._states):
            (at,) = upload(self.device, rows)
            self._states = self._states.index_select(0, at)

    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """See `forward.Decoder.hidden`; the own states of the wanted positions are kept for `follow`."""
        kernels, weights, spec = self._kernels, self._weights, self.spec.layer
        eps, (pages,), states = spec.norm_eps, kv.layers, self._states
        tokens = kernels.rms_norm(weights.embedding.index_select(0, batch.tokens), weights.token_norm, eps)
        normed = kernels.rms_norm(states, weights.state_norm, eps)
        qkv = kernels.linear(torch.cat((tokens, normed), -1), self._qkv, weights.qkv_bias)
        rotation = self._rope.index_select(0, batch.positions)
        queries = kernels.rope_write_kv(qkv, self._shape, rotation, None, eps, batch.slot_mapping, pages)
        residual = normed if self.spec.normed_residual else states
        wanted = batch.logits_indices
        if not len(wanted):
            return residual[:0]
        plan = kernels.plan_attention(batch, None, self.dtype)
        x = kernels.paged_attention(queries, pages, plan, spec.attention_scale, None)
        if len(wanted) < len(batch.tokens):
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        x = kernels.linear(x, self._output, weights.output_bias)
        x, residual = kernels.add_rms_norm(x, residual, weights.mlp_norm, eps)
        x = kernels.linear(x, self._gate_up, weights.gate_up_bias)
        x = kernels.gated_activation(x, spec.activation)
        x = kernels.linear(x, self._down, weights.down_bias)
        x, self._states = kernels.add_rms_norm(x, residual, weights.norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, draft_vocab_size] of hidden states."""
        logits: Tensor = self._kernels.linear(hidden, self._head)
        return logits

    def draft(self, batch: Batch, kv: PagedKV, most: Ints, least: float) -> None:
        """Returns None: no backend supports all passes in one call; `forward.Forward` runs them one by one."""
