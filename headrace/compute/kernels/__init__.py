"""The seam between the decoder and whatever computes it fastest: few, fused calls.

The plain-torch reference defines what each call means and runs everywhere; every other backend is held to it
by `tests/compute/kernels` and `tests/oracle`. A new backend is one module with a class and its line in
`_BACKENDS`. Knows nothing of models, sequences or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.quantization.weight import QuantizedWeight
from headrace.compute.sampling.allowed import Allowed
from headrace.compute.sampling.choice import Choice

if TYPE_CHECKING:
    from headrace.compute.kernels.stack import Stack

Activation = Literal["silu", "gelu_tanh"]


class HeadShape(NamedTuple):
    """How a packed row of queries, keys and values is cut: ``(heads + 2 * kv_heads) * head_dim`` wide."""

    heads: int
    kv_heads: int
    head_dim: int


SMALLEST = 1e-30
"""What is kept as integers and nowhere larger than this is kept as zeros: the inverse of its scale is not finite."""


class Pages(NamedTuple):
    """One layer's keys and values in blocks: [num_blocks, block_size, G, D], a block of each contiguous.

    In which order a block's elements lie is the backend's own affair (`Kernels.layout`): others move whole blocks.
    Integers (int8) come with a scale for each token and head, float32 [num_blocks, G, block_size]: an element is
    ``integer * scale``, with ``scale = max|x| / 127`` over the head and the integer ``x * (127 / max|x|)`` rounded
    to nearest, ties to even.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class KernelsUnavailable(RuntimeError):
    """A backend that cannot work here; the message says why and what would help."""


class Kernels(Protocol):
    """What the decoder asks for. T tokens, H heads, G kv heads, D head size; D of a token is contiguous.

    Norm weights are float32 and hold the family's offset already (Gemma's ``1 + w``); norms, rotations and
    softmax are computed in float32 whatever the dtype of the activations. Calls may write into ``residual`` and
    ``qkv``; every other argument is only read.
    """

    name: str
    isa: str
    """The instruction set that the kernels were built for and use here; empty where torch chooses."""
    layout: str
    """How the elements of a block lie: what one backend has written another reads only if theirs are equal."""

    def prepare_linear(self, weight: Tensor | QuantizedWeight) -> Any:
        """Turn a weight [out, in] into whatever this backend's `linear` likes best; called once per weight."""

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: [T, in] to [T, out], in the dtype of ``x``.

        With a quantized weight of 8-bit activations each token's activations are first rounded to integers
        ``round(x / s)`` with ``s = max|x| / 127``, and the product is theirs times ``s``.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension (arXiv:1910.07467)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``residual + x``, and its `rms_norm`: returns (normed, new residual)."""

    def rope_write_kv(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotation: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        slots: Tensor,
        pages: Pages,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their pages, return queries [T, H, D].

        Args:
            qkv: [T, (H + 2G) * D], queries then keys then values.
            shape: how ``qkv`` is cut.
            rotation: float32 [T, 2, N] of the tokens' positions, N ≤ D the rotated part of a head:
                ``[:, 0]`` are the cosines (second half equals the first), ``[:, 1]`` the sines with the sign
                of the half-rotation in them (first half negative): ``x * cos + roll(x, N/2) * sin``.
            qk_norm: float32 [H + G, D] weights of a per-head norm before the rotation, or None.
            eps: of that norm.
            slots: int64 [T], ``block * block_size + offset``.
            pages: written.
        """

    def plan_attention(self, batch: Batch, window: int | None, dtype: torch.dtype) -> Any:
        """What `paged_attention` needs beyond the tensors; made once per step and window, used by all layers.

        ``window`` is how many keys a token sees, itself included; None: all. ``dtype`` is the queries'.
        """

    def paged_attention(
        self,
        queries: Tensor,
        pages: Pages,
        plan: Any,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Causal attention of all rows over their blocks: [T, H, D] to [T, H * D].

        Query head ``h`` reads key head ``h // (H / G)``. Scores are ``scale * q·k``, ``scale`` > 0; with
        ``softcap`` c they become ``c * tanh(scores / c)`` before masking (arXiv:2408.00118).
        """

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """``activation(gate) * up`` of a merged [T, 2 * I]: [T, I] (arXiv:2002.05202)."""

    def likeliest(self, logits: Tensor) -> Tensor:
        """The first token int64 [S] of the largest logit of each row [S, V], or a fault: see `draw.likeliest`."""

    def choose(self, logits: Tensor, choice: Choice) -> Tensor:
        """A token int64 [S] drawn from each row of logits [S, V], or a fault: see `choice.choose`.

        Every filter is a threshold on the logit, equals are kept or removed together, and the draw inverts the
        distribution function in the order of the tokens: a row's token depends on nothing but the row.
        """

    def restrict(self, logits: Tensor, allowed: Allowed) -> Tensor:
        """``logits`` [S, V] with minus infinity in place of the tokens that are not allowed: see `allowed.restrict`.

        What is given stays as it is.
        """

    def prepare_stack(self, stack: Stack) -> Any:
        """Turn a decoder's layers into whatever this backend's `run_stack` likes best; called once."""

    def run_stack(
        self,
        stack: Any,
        batch: Batch,
        pages: Sequence[Pages],
    ) -> Tensor:
        """From tokens to the norm after the last layer: hidden states [S, hidden] of the batch's wanted positions.

        `stack.apply` says what that is in calls of the others. ``pages`` are each layer's.
        """


def _cpp(device: torch.device, isa: str | None) -> Kernels:
    if device.type != "cpu":
        raise KernelsUnavailable(f"kernels 'cpp' compute on the CPU, not on {device}")
    from headrace.compute.kernels.cpp import CppKernels

    return CppKernels(isa)


def _torch(device: torch.device, isa: str | None) -> Kernels:
    if isa is not None:
        raise KernelsUnavailable(f"--cpu-isa {isa}: kernels 'torch' choose their instructions themselves")
    from headrace.compute.kernels.reference import TorchKernels

    return TorchKernels()


_BACKENDS: dict[str, Callable[[torch.device, str | None], Kernels]] = {"cpp": _cpp, "torch": _torch}
"""Fastest first. Each makes its kernels for a device and an instruction set or raises `KernelsUnavailable`."""


def select(name: str, device: torch.device, isa: str | None = None) -> Kernels:
    """The backend called ``name``, or with "auto" the fastest that works on ``device``.

    ``isa`` is the instruction set that it shall use, which "auto" then needs to be one of its own; None: the best.

    Raises:
        KernelsUnavailable: the name is unknown, or the backend cannot work here.
    """
    if name != "auto":
        if name not in _BACKENDS:
            known = ", ".join(sorted(_BACKENDS))
            raise KernelsUnavailable(f"kernels '{name}' do not exist; choose auto or one of: {known}")
        return _BACKENDS[name](device, isa)
    for make in _BACKENDS.values():
        try:
            return make(device, isa)
        except KernelsUnavailable:
            if isa is not None:  # nothing slower has it either
                raise
    raise KernelsUnavailable(f"no kernels work on {device}")
