"""The Triton kernels of a GPU as `Kernels`: checks tensors and launches.

`Kernels` defines each call. Products of plain weights are those of torch's library. In Triton's interpreter the same
source runs on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch, StepInterrupted
from headrace.compute.kernels import (
    Activation,
    Counts,
    Drafted,
    Greedy,
    HeadNorm,
    HeadShape,
    Pages,
    linear,
    reference,
)
from headrace.compute.kernels.adapters import OF_EXPERTS, LayerChanges, StepChanges, of_expert
from headrace.compute.kernels.experts import AddOfTokens, Mlp, Router
from headrace.compute.kernels.experts import apply as one_by_one
from headrace.compute.kernels.experts import mlp as mlp_as_defined
from headrace.compute.kernels.latent import DefinedLatents
from headrace.compute.kernels.linear import Prepared
from headrace.compute.kernels.mixers import LineRows, Mixer, StepRows
from headrace.compute.kernels.mixers import mix as mix_as_defined
from headrace.compute.kernels.stack import (
    Layer,
    Stack,
    apply,
    copy_tapped,
    feed,
    layer_inputs,
    with_input,
)
from headrace.compute.kernels.triton import adapting, elementwise, mixing, mixtures, quantized, sampling
from headrace.compute.kernels.triton import experts as grouped
from headrace.compute.kernels.triton.adapting import ChangesOfLayer, DeviceAdapter
from headrace.compute.kernels.triton.launches import AttentionPlan, Scores
from headrace.compute.kernels.triton.mixing import DeviceMixer
from headrace.compute.kernels.triton.mixtures import GroupedExperts, Parts
from headrace.compute.kernels.triton.quantized import Packed, Rounded
from headrace.compute.kernels.triton.target import power, target_of
from headrace.compute.quantization.weight import QuantizedWeight
from headrace.compute.sampling.choice import TokenChoice
from headrace.compute.sampling.penalties import IN_PROMPT, Allowed, Penalty
from headrace.compute.transfer import upload

_LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
_NORMS: dict[HeadNorm, int] = {"head": 1, "projection": 2, "rotated": 3, "values": 4}
_LANES = 512
"""Logits that a program of sampling reads at once."""
_HEADS_TOGETHER = 8
"""Heads that a program of rotation takes at most: a power of two."""


class TritonKernels(DefinedLatents):
    """The backend for GPUs; see `Kernels` for each call.

    Raises:
        KernelsUnavailable: Triton cannot run on ``device``.
    """

    name = "triton"
    isa = ""
    layout = "token, head, feature"

    def __init__(self, device: torch.device) -> None:
        self._device, self._target = device, target_of(device)
        self.fp8 = self._target.fp8 is not None
        self.narrow_pages = self.narrow = self.coded = False
        self._reference = reference.TorchKernels()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def prepare_linear(
        self, weight: Tensor | QuantizedWeight, *, consume: bool = False
    ) -> linear.Prepared | Packed:
        return quantized.prepare(weight)

    prepare_head = prepare_linear

    def linear(
        self, x: Tensor | Rounded, weight: linear.Prepared | Packed, bias: Tensor | None = None
    ) -> Tensor:
        """See `Kernels.linear`. Activations may be in the bytes that the weight wants already."""
        if isinstance(weight, Packed):
            return quantized.multiply(x, weight, bias, self._target)
        assert isinstance(x, Tensor), "only a quantized weight takes bytes"
        return linear.apply(x, weight, bias)

    def logits(self, x: Tensor, weight: Prepared | Packed, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.logits`: in the dtype of ``x``."""
        return self.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps, 0)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.contiguous()
        return self._norm(x, residual, weight, eps, 0)[0], residual

    def add_norm_for(
        self, x: Tensor | Parts, residual: Tensor, weight: Tensor | None, eps: float, following: Any
    ) -> tuple[Tensor | Rounded, Tensor]:
        """`add_rms_norm` with the result as the linear layer of the weight ``following`` wants it."""
        residual = residual.contiguous()
        largest = _bytes_of(following)
        norm = self._combined if isinstance(x, Parts) else self._norm
        return _given(norm(x, residual, weight, eps, largest), largest, residual.dtype), residual  # type: ignore[arg-type]

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, largest: int
    ) -> tuple[Tensor, Tensor]:
        """Rows and, if they are bytes up to ``largest``, their scales."""
        x = x.contiguous()
        width = x.shape[-1]
        flat = x.view(-1, width)
        out, scales = quantized.room(flat, width, largest)
        if out.numel():
            block = power(width)
            elementwise.norm[(len(flat),)](
                x,
                x if residual is None else residual,
                x if weight is None else weight,
                out,
                scales,
                width,
                eps,
                ADD=residual is not None,
                NORMED=weight is not None,
                LARGEST=largest,
                BLOCK=block,
                num_warps=warps_for(block),
            )
        return out.view(x.shape), scales

    def embed_norm(self, tokens: Tensor, stack: Stack) -> tuple[Tensor | Rounded, Tensor]:
        """The embeddings of ``tokens`` [T], normed as the first layer wants them, and as they are."""
        width, largest = stack.embedding.shape[1], _bytes_of(stack.layers[0].qkv.weight)
        residual = stack.embedding.new_empty((len(tokens), width), dtype=stack.dtype)
        (normed, scales), block = quantized.room(residual, width, largest), power(width)
        elementwise.embed_norm[(len(tokens),)](
            tokens,
            stack.embedding,
            stack.embedding if stack.input_norm is None else stack.input_norm,
            residual,
            normed,
            scales,
            width,
            stack.embedding_scale,
            stack.eps,
            SCALED=stack.embedding_scale != 1.0,
            NORMED=stack.input_norm is not None,
            LARGEST=largest,
            BLOCK=block,
            num_warps=warps_for(block),
        )
        return _given((normed, scales), largest, residual.dtype), residual

    def rope_write_kv(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotation: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        slots: Tensor,
        pages: Pages,
        head_norm: HeadNorm = "head",
        positions: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.rope_write_kv`. With ``positions`` int64 [T], ``rotation`` has those of all positions.

        A token whose slot is below zero is not written.
        """
        qkv, rotation = qkv.contiguous(), rotation.contiguous()
        heads, kv_heads, head_dim = shape
        queries = qkv.new_empty((len(qkv), heads, head_dim))
        scaled = pages.key_scales is not None and pages.value_scales is not None
        together = math.gcd(heads, kv_heads, _HEADS_TOGETHER)
        elementwise.rope_write[(len(qkv), (heads + 2 * kv_heads) // together)](
            qkv,
            queries,
            pages.keys,
            pages.values,
            pages.key_scales if scaled else pages.keys,
            pages.value_scales if scaled else pages.values,
            rotation,
            slots if positions is None else positions,
            rotation if qk_norm is None else qk_norm,
            slots,
            pages.keys.stride(0),
            pages.key_scales.stride(0) if pages.key_scales is not None else 0,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=head_dim,
            BLOCK_D=power(head_dim),
            ROTARY=rotation.shape[-1],
            PAGE=pages.keys.shape[1],
            GATHERED=positions is not None,
            NORM=0 if qk_norm is None else _NORMS[head_norm],
            LARGEST=_LARGEST[pages.keys.dtype] if scaled else 0,
            TOGETHER=together,
            num_warps=warps_for(2 * together * power(head_dim)),
        )
        return queries

    def plan_attention(
        self, batch: Batch, window: int | None, dtype: torch.dtype
    ) -> AttentionPlan | reference.AttentionPlan:
        if batch.joint is not None:  # rare, and the pages have the same layout
            return reference.plan(batch, window, dtype)
        return AttentionPlan(batch, window, self._target)

    def paged_attention(
        self,
        queries: Tensor,
        pages: Pages,
        plan: AttentionPlan | reference.AttentionPlan,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, reference.AttentionPlan):
            return self._reference.paged_attention(queries, pages, plan, scale, softcap, sinks)
        return plan.attend(queries.contiguous(), pages, Scores(scale, softcap, sinks))

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        out = self.gated_for(gate_up, activation, None)
        assert isinstance(out, Tensor)
        return out

    def gated_for(self, gate_up: Tensor, activation: Activation, following: Any) -> Tensor | Rounded:
        """`gated_activation` with the result as the linear layer of the weight ``following`` wants it."""
        return quantized.gated(gate_up, _ACTIVATIONS[activation], _bytes_of(following))

    def mlp(self, x: Tensor, of: Mlp, activation: Activation) -> Tensor:
        return mlp_as_defined(self, x, of, activation)

    def prepare_router(self, router: Router) -> Router:
        return mixtures.prepared_router(router)

    def route(self, x: Tensor, router: Router, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernels.route`. Tokens whose ``slots`` int64 [T] are below zero have no experts."""
        return mixtures.route(x, router, self._target, slots)

    def prepare_experts(self, each: Sequence[Mlp], dtype: torch.dtype) -> GroupedExperts | Sequence[Mlp]:
        return mixtures.group(each) or each

    def experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        experts: GroupedExperts | Sequence[Mlp],
        activation: Activation,
        add: AddOfTokens | None = None,
    ) -> Tensor:
        """See `Kernels.experts`; ``add`` is that of `DeviceChanges.of`."""
        if not isinstance(experts, GroupedExperts):
            return one_by_one(self, x, indices, weights, experts, activation, add)
        assert add is None or isinstance(add, ChangesOfLayer)
        ascending, ranks = indices.sort(-1)
        ordered = weights.gather(1, ranks).float()
        parts = self.experts_apart(x, ascending.contiguous(), ordered, experts, activation, add)
        return self._combined(parts, None, None, 0.0, 0)[0]

    def experts_apart(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        experts: GroupedExperts,
        activation: Activation,
        add: ChangesOfLayer | None = None,
    ) -> Parts:
        """`experts` before the sum, for ``indices`` in ascending order."""
        kind = _ACTIVATIONS[activation]
        parts = mixtures.results(x, indices, weights, experts, kind, self._target, add)
        if experts.beside is None:
            return parts
        if add is None:
            return parts._replace(beside=self._mlp(x, experts.beside, activation))
        gate_up, down = experts.beside
        names = [of_expert(name, experts.count) for name in OF_EXPERTS]
        wide = add(names[0], x, self.linear(x, gate_up.weight, gate_up.bias))
        inner = self.gated_activation(wide, activation)
        return parts._replace(beside=add(names[1], inner, self.linear(inner, down.weight, down.bias)))

    def _mlp(self, x: Tensor | Rounded, mlp: Mlp, activation: Activation) -> Tensor:
        (gate_up, down) = mlp
        inner = self.gated_for(self.linear(x, gate_up.weight, gate_up.bias), activation, down.weight)
        return self.linear(inner, down.weight, down.bias)

    def _combined(
        self, parts: Parts, residual: Tensor | None, weight: Tensor | None, eps: float, largest: int
    ) -> tuple[Tensor, Tensor]:
        """`_norm` for sums of parts."""
        width = parts.results.shape[1]
        rows, columns = parts.ids.shape
        out, scales = quantized.room(parts.results[:rows], width, largest)
        block = power(width)
        if rows:
            grouped.combine[(rows,)](
                parts.results,
                parts.ids,
                parts.weights,
                parts.results if parts.beside is None else parts.beside,
                parts.results if residual is None else residual,
                parts.weights if weight is None else weight,
                out,
                scales,
                width,
                eps,
                parts.experts,
                EACH=columns,
                BESIDE=parts.beside is not None,
                ADD=residual is not None,
                NORMED=weight is not None,
                LARGEST=largest,
                BLOCK=block,
                num_warps=warps_for(block),
            )
        return out, scales

    def prepare_mixer(self, mixer: Mixer) -> DeviceMixer | Mixer:
        return mixing.prepared(mixer)

    def mix(
        self,
        inputs: Sequence[Tensor],
        mixer: DeviceMixer | Mixer,
        rows: StepRows | LineRows,
        states: Sequence[Tensor],
    ) -> Tensor:
        """See `Kernels.mix`; rows that only the device knows are those of a graph."""
        if isinstance(mixer, DeviceMixer):
            return mixing.mix(inputs, mixer.mixer, rows, states, self._target)
        assert isinstance(rows, StepRows), "no graph has such a mixer"
        return mix_as_defined(inputs, mixer, rows, states)

    def prepare_stack(self, stack: Stack) -> Stack:
        return stack

    def prepare_adapter(self, layers: LayerChanges, stack: Stack) -> DeviceAdapter:
        return adapting.prepared(layers, self._device)

    def step_changes(self, batch: Batch) -> StepChanges:
        return adapting.DeviceChanges(batch, self._target) if batch.adapters else StepChanges(batch)

    def run_stack(self, stack: Stack, batch: Batch, pages: Sequence[Pages]) -> Tensor:
        plain = not batch.adapters and all(each is None for each in (batch.features, batch.axes, batch.joint))
        fused = stack.whole and plain and all(layer.plain for layer in stack.layers)
        return run_whole(self, stack, batch, pages) if fused else apply(self, stack, batch, pages)

    def prepare_greedy(self, stack: Stack, head: object) -> Greedy | None:
        return None

    def draft(
        self, stack: Stack, head: object, batch: Batch, pages: Sequence[Pages], most: Counts, least: float
    ) -> Drafted | None:
        return None

    def likeliest(self, logits: Tensor) -> Tensor:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        sampling.likeliest[(rows,)](logits, tokens, vocab, BLOCK=4 * _LANES, num_warps=8)
        return tokens

    def choose(self, logits: Tensor, choice: TokenChoice) -> Tensor:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        lines = upload(logits.device, *choice)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        sampling.choose[(rows,)](logits, tokens, *lines, vocab, BLOCK=_LANES, num_warps=4)
        return tokens

    def likeliest_outputs(self, x: Tensor, weight: Prepared | Packed) -> Tensor:
        return self.likeliest(self.logits(x, weight))

    def restrict(self, logits: Tensor, allowed: Allowed) -> Tensor:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        lines = np.full(rows, -1, dtype=np.int32)
        lines[allowed.lines] = np.arange(len(allowed.lines))
        width = allowed.words.shape[1]
        lines_, words = upload(logits.device, lines, np.ascontiguousarray(allowed.words).reshape(-1))
        out = torch.empty_like(logits)
        grid = (rows, -(-vocab // 2048))
        sampling.permit[grid](logits, out, lines_, words, vocab, width, BLOCK=2048)
        return out

    def penalize(self, logits: Tensor, counts: Tensor, penalty: Penalty) -> None:
        vocab = logits.shape[1]
        arrays = upload(logits.device, *penalty)
        grid = (len(penalty.rows), -(-vocab // 2048))
        sampling.penalize[grid](logits, counts, *arrays, vocab, IN_PROMPT=IN_PROMPT, BLOCK=2048)

    def accept(self, drawn: Tensor, drafts: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
        out = torch.empty(len(drawn), dtype=torch.bool, device=drawn.device)
        sampling.accept[(len(drawn),)](drawn, drafts, first, offsets, out, num_warps=1)
        return out


def _bytes_of(weight: Any) -> int:
    """The largest number of the activations in bytes that ``weight`` takes, or 0."""
    return weight.largest if isinstance(weight, Packed) else 0


def _given(rows: tuple[Tensor, Tensor], largest: int, dtype: torch.dtype) -> Tensor | Rounded:
    return Rounded(*rows, dtype) if largest else rows[0]


def warps_for(block: int) -> int:
    """Warps of a program that holds a row of ``block`` elements."""
    return max(1, min(16, block // 512))


# All layers of a decoder by the Triton kernels: `stack.apply` with what stands beside each kernel fused into it.
#
# The embedding is gathered and normed in one launch, and rotations are read by position where they are used. A layer
# takes nine launches: four products, two norms, the rotation with the write of keys and values, attention, and the
# activation (two more with a norm after each product, one more where keys are split between programs). Where a product
# reads bytes, the norm or activation before it writes them; attention takes one more launch for that.


def run_whole(kernels: TritonKernels, stack: Stack, batch: Batch, pages: Sequence[Pages]) -> Tensor:
    """See `Kernels.run_stack`."""
    windows = {layer.window for layer in stack.layers}
    plans = {window: kernels.plan_attention(batch, window, stack.dtype) for window in windows}
    x, residual = kernels.embed_norm(batch.tokens, stack)
    inputs = layer_inputs(kernels, stack, batch, residual)
    following = [layer.qkv.weight for layer in stack.layers[1:]] + [None]
    for number, (layer, held, after) in enumerate(zip(stack.layers, pages, following, strict=True)):
        copy_tapped(batch, number, residual)
        if batch.interrupt is not None and batch.interrupt.is_set():
            raise StepInterrupted
        qkv = kernels.linear(x, layer.qkv.weight, layer.qkv.bias)
        rope = stack.ropes[layer.rope]
        slots, positions = batch.slot_mapping, batch.positions
        queries = kernels.rope_write_kv(
            qkv, stack.packed(layer), rope, layer.qk_norm, stack.eps, slots, held, stack.head_norm, positions
        )
        attended = kernels.paged_attention(
            queries, held, plans[layer.window], stack.scale, stack.softcap, layer.sinks
        )
        if layer is stack.layers[-1] and len(batch.logits_indices) < len(batch.tokens):
            # No position attends to the last layer's output: only wanted positions continue.
            attended, residual = attended[batch.logits_indices], residual[batch.logits_indices]
            inputs = None if inputs is None else inputs[batch.logits_indices]
        y = kernels.linear(attended, layer.output.weight, layer.output.bias)
        if layer.post_attention_norm is not None:
            y = kernels.rms_norm(y, layer.post_attention_norm, stack.eps)
        fed, residual = _feed(kernels, stack, layer, y, residual, slots if len(y) == len(slots) else None)
        if layer.post_mlp_norm is not None:
            assert isinstance(fed, Tensor)
            fed = kernels.rms_norm(fed, layer.post_mlp_norm, stack.eps)
        if layer.input_gate is not None and inputs is not None:
            assert isinstance(fed, Tensor)
            fed, residual = with_input(kernels, stack, layer.input_gate, fed, residual, inputs[:, number])
        residual = residual if layer.scale == 1.0 else residual.mul_(layer.scale)
        x, residual = kernels.add_norm_for(fed, residual, layer.following_norm, stack.eps, after)
    copy_tapped(batch, len(stack.layers), residual)
    assert isinstance(x, Tensor)  # nothing follows the last norm here
    return x


def _feed(
    kernels: TritonKernels,
    stack: Stack,
    layer: Layer,
    attended: Tensor,
    residual: Tensor,
    slots: Tensor | None,
) -> tuple[Tensor | Parts, Tensor]:
    """What the inner part of a layer returns after the norm of attention's result, and the new residual.

    ``slots`` are those of the tokens, if some of them may be padding.
    """
    of = layer.feed
    assert of is not None, "a plain layer has one"
    if isinstance(of, Mlp):
        weight = of.gate_up.weight
        given, residual = kernels.add_norm_for(attended, residual, layer.mlp_norm, stack.eps, weight)
        return kernels._mlp(given, of, stack.activation), residual
    x, residual = kernels.add_rms_norm(attended, residual, layer.mlp_norm, stack.eps)
    if not isinstance(of.each, GroupedExperts):
        return feed(kernels, of, x, stack), residual
    parts = kernels.experts_apart(x, *kernels.route(x, of.router, slots), of.each, stack.activation)
    alone = layer.post_mlp_norm is None and layer.input_gate is None and layer.scale == 1.0
    return parts if alone else kernels._combined(parts, None, None, 0.0, 0)[0], residual
