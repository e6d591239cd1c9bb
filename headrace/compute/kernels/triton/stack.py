"""All layers of a decoder by the Triton kernels: `stack.apply` with what stands beside each kernel fused into it.

The embedding is gathered and normed in one launch, and rotations are read by position where they are used. A layer
takes nine launches: four products, two norms, the rotation with the write of keys and values, attention, and the
activation (two more with a norm after each product, one more where keys are split between programs). Where a product
reads bytes, the norm or activation before it writes them; attention takes one more launch for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import Pages
from headrace.compute.kernels.stack import Stack, copy_tapped
from headrace.compute.step_interrupt import StepInterrupted

if TYPE_CHECKING:
    from headrace.compute.kernels.triton.backend import TritonKernels


def run(kernels: TritonKernels, stack: Stack, batch: Batch, pages: Sequence[Pages]) -> Tensor:
    """See `Kernels.run_stack`."""
    windows = {layer.window for layer in stack.layers}
    plans = {window: kernels.plan_attention(batch, window, stack.dtype) for window in windows}
    x, residual = kernels.embed_norm(batch.tokens, stack)
    following = [layer.qkv.weight for layer in stack.layers[1:]] + [None]
    for number, (layer, held, after) in enumerate(zip(stack.layers, pages, following, strict=True)):
        copy_tapped(batch, number, residual)
        if batch.bell is not None and batch.bell.is_set():
            raise StepInterrupted
        qkv = kernels.linear(x, layer.qkv.weight, layer.qkv.bias)
        rope = stack.ropes[layer.rope]
        slots, positions = batch.slot_mapping, batch.positions
        queries = kernels.rope_write_kv(
            qkv, stack.heads, rope, layer.qk_norm, stack.eps, slots, held, stack.head_norm, positions
        )
        attended = kernels.paged_attention(queries, held, plans[layer.window], stack.scale, stack.softcap)
        if layer is stack.layers[-1] and len(batch.logits_indices) < len(batch.tokens):
            # No position attends to the last layer's output: only wanted positions continue.
            attended, residual = attended[batch.logits_indices], residual[batch.logits_indices]
        y = kernels.linear(attended, layer.output.weight, layer.output.bias)
        if layer.post_attention_norm is not None:
            y = kernels.rms_norm(y, layer.post_attention_norm, stack.eps)
        x, residual = kernels.add_norm_for(y, residual, layer.mlp_norm, stack.eps, layer.gate_up.weight)
        y = kernels.linear(x, layer.gate_up.weight, layer.gate_up.bias)
        x = kernels.gated_for(y, stack.activation, layer.down.weight)
        y = kernels.linear(x, layer.down.weight, layer.down.bias)
        if layer.post_mlp_norm is not None:
            y = kernels.rms_norm(y, layer.post_mlp_norm, stack.eps)
        x, residual = kernels.add_norm_for(y, residual, layer.following_norm, stack.eps, after)
    copy_tapped(batch, len(stack.layers), residual)
    assert isinstance(x, Tensor)  # nothing follows the last norm here
    return x
