"""The interface between the decoder and its fastest implementation: few, fused calls.

The plain-torch reference defines each call and runs everywhere; `tests/compute/kernels` and `tests/oracle` compare
every other backend with it. To add a backend, write a module with a class and add it to `_BACKENDS`.

- `reference`: the backend in plain torch. `linear`: its linear layers.
- `experts`: mixtures of experts as values, and their definition.
- `mixers`: mixers with a recurrent state as values, and their definition.
- `recurrent`: the states of mixers during a step.
- `adapters`: LoRA adapters as values, and their definition.
- `stack`: all layers of a decoder as one value. `per_layer`: inputs of each layer beside its states.
- `latent`: attention over latent keys and values.
- `cpp`: the backend in C++ for CPUs. `cpp_checks`: checks of its arguments.
- `triton`: the backend in Triton for GPUs.
- `native_calls`: whole forward passes in one call of it. `native_experts`: routers and experts for it.
- `native_mixers`: mixers for it. `native_adapters`: adapters for it. `native_latent`: attention over latents for it.
- `step_arrays`: the inputs of a step in one call of it.
- `packed`: weights in the layout of the C++ backend. `screen`: the copy of a head that finds likeliest tokens for it.
- `measure`: the time of each part of a forward pass; the memory bandwidth and arithmetic of a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.quantization.weight import QuantizedWeight
from headrace.compute.sampling.choice import TokenChoice
from headrace.compute.sampling.penalties import Allowed, Penalty

if TYPE_CHECKING:
    from headrace.compute.kernels.adapters import LayerChanges, StepChanges
    from headrace.compute.kernels.experts import AddOfTokens, Mlp, Router
    from headrace.compute.kernels.latent import FewTokens
    from headrace.compute.kernels.mixers import LineRows, Mixer, StepRows
    from headrace.compute.kernels.stack import Stack

logger = logging.getLogger(__name__)

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "squared_relu"]
"""What becomes of a gate and the outputs beside it: see `Kernels.gated_activation`. "squared_relu" is that of an MLP
or of experts without gates: see `experts.activated`."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The numbers of "clamped_swiglu" (also in csrc/operations.h and the Triton kernel)."""
HeadNorm = Literal["head", "projection", "rotated", "values"]
"""How queries and keys are normalized: each head before its rotation, or all heads of a token as one before it (OLMo
2), or each head after its rotation (Hunyuan), or each head before it and each head of values too (Gemma 4)."""


class HeadShape(NamedTuple):
    """The layout of a packed row of queries, keys and values, ``(heads + 2 * kv_heads) * head_dim`` wide."""

    heads: int
    kv_heads: int
    head_dim: int


SMALLEST = 1e-30
"""A head whose values are all smaller than this is stored as zeros, because the inverse of its scale is not finite."""


class Pages(NamedTuple):
    """One layer's keys and values in blocks: [num_blocks, block_size, G, D], each block contiguous.

    The backend decides in which order a block's elements are stored (`Kernels.layout`); all other code moves whole
    blocks. Integers (int8) come with a scale for each token and head, float32 [num_blocks, G, block_size]. An element
    is ``integer * scale``, with ``scale = max|x| / 127`` over the head and the integer ``x * (127 / max|x|)`` rounded
    to nearest, ties to even. Pages in fp8 (e4m3) have the same scales, with 448 in place of 127. Other pages are in
    the dtype of the activations or, beside float32, in bfloat16 (`Kernels.narrow_pages`).

    ``group``: which block tables of a batch name its blocks; 0: the batch's own, else those of ``batch.windows``.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    group: int = 0


Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Drafted(NamedTuple):
    """Likeliest tokens that continue S rows, on the host.

    The first ``counts[s]`` of ``tokens`` int64 [S, N] are the draft of row ``s``, each with its probability at
    temperature 1 in ``probabilities`` float32 [S, N]. The first ``computed[s]`` of them have keys and values.
    """

    tokens: Counts
    probabilities: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    counts: Counts
    computed: Counts


Greedy = Callable[[Batch, Sequence[Pages]], Counts]
"""From a batch to the likeliest tokens int64 [S] of its wanted positions, on the host: see `Kernels.prepare_greedy`."""


class KernelsUnavailable(RuntimeError):
    """A backend that does not work on this machine; the message has the reason and a remedy."""


class Kernels(Protocol):
    """The operations of the decoder. T tokens, H heads, G kv heads, D head size; D of a token is contiguous.

    Norm weights are float32 and include the family's offset already (Gemma's ``1 + w``). Norms, rotations and softmax
    are computed in float32 whatever the dtype of the activations. Calls may write into ``residual`` and ``qkv``;
    every other argument is only read.
    """

    name: str
    isa: str
    """The instruction set that the kernels use here; empty if torch chooses."""
    layout: str
    """The element order of a block: a backend can read another one's blocks only if their layouts are equal."""
    fp8: bool
    """Whether weights in fp8 are multiplied as they are; otherwise they are expanded when they are loaded."""
    narrow_pages: bool
    """Whether pages may be in bfloat16 beside activations in float32."""
    narrow: bool
    """Whether linear layers in float32 keep weights that bfloat16 holds exactly in its bits: see `packed.narrowed`."""
    coded: bool
    """Whether linear layers take 12 bits for a weight of bfloat16: see `packed.code`."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Make ``target`` equal to ``source``, of the same bytes in other memory; both are contiguous."""

    def prepare_linear(self, weight: Tensor | QuantizedWeight, *, consume: bool = False) -> Any:
        """Convert a weight [out, in] to the form that this backend's `linear` needs; called once per weight.

        ``consume``: nothing else reads the weight, so what has been converted may be freed before the rest is.
        """

    def prepare_head(self, weight: Tensor | QuantizedWeight, *, consume: bool = False) -> Any:
        """`prepare_linear` of a head whose `likeliest_outputs` will be asked for: where that is quicker, with more
        memory than others take.
        """

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: [T, in] to [T, out], in the dtype of ``x``.

        With a quantized weight of 8-bit activations, each token's activations are first rounded to integers ``round(x
        / s)`` with ``s = max|x| / 127``, and the product with these is multiplied by ``s``. With a weight in fp8 they
        are rounded to e4m3, with ``s = max|x| / 448``.
        """

    def logits(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """`linear` of a head, in float32 where that costs nothing: products are summed in it, and rounded to 16 bits
        two tokens may become equally likely.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension (arXiv:1910.07467)."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``residual + x``, and its `rms_norm`: returns (normed, new residual).

        Without a ``weight`` both are the sum, and may be the same tensor.
        """

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
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their pages, return queries [T, H, D].

        Args:
            qkv: [T, (H + 2G) * D], queries then keys then values.
            shape: how ``qkv`` is divided. With G = 0 it has only queries, and nothing is written: the layer attends
                to keys and values of another one.
            rotation: float32 [T, 2, N] of the tokens' positions, N ≤ D the rotated part of a head: ``[:, 0]`` are the
                cosines (second half equals the first), ``[:, 1]`` the sines including the sign of the half-rotation
                (first half negative): ``x * cos + roll(x, N/2) * sin``.
            qk_norm: float32 [H + G, D] weights of the norm that ``head_norm`` names, or None. With "values" it is [H +
                2G, D].
            eps: epsilon of that norm.
            slots: int64 [T], ``block * block_size + offset``.
            pages: the pages to write.
            head_norm: what is normalized together, and when.
        """

    def plan_attention(self, batch: Batch, window: int | None, dtype: torch.dtype) -> Any:
        """Everything that `paged_attention` needs beyond the tensors; made once per step and window, used by all
        layers.

        ``window`` is the number of keys that a token attends to, itself included; None: all. ``dtype`` is that of the
        queries.
        """

    def paged_attention(
        self,
        queries: Tensor,
        pages: Pages,
        plan: Any,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of all rows over their blocks: [T, H, D] to [T, H * D].

        Query head ``h`` reads key head ``h // (H / G)``. Scores are ``scale * q·k``, ``scale`` > 0; with
        ``softcap`` c they become ``c * tanh(scores / c)`` before masking (arXiv:2408.00118).
        ``sinks`` float32 [H] are one more score of each head in the softmax, which has no value (arXiv:2309.17453).
        """

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """``activation(gate) * up`` of a merged [T, 2 * I]: [T, I] (arXiv:2002.05202).

        "clamped_swiglu" is ``g * sigmoid(SWIGLU_ALPHA * g) * (u + 1)`` in float32, with ``g = min(gate,
        SWIGLU_LIMIT)`` and ``u`` the other half between the limits (arXiv:2508.10925).
        """

    def mlp(self, x: Tensor, of: Mlp, activation: Activation) -> Tensor:
        """What an MLP returns [T, hidden] for ``x`` [T, hidden]; `experts.mlp` defines it."""

    def prepare_router(self, router: Router) -> Any:
        """Convert a router to the form that this backend's `route` needs; called once."""

    def route(self, x: Tensor, router: Any) -> tuple[Tensor, Tensor]:
        """The experts int64 [T, K] of each token of ``x`` [T, hidden], and their weights float32 [T, K].

        `experts.route` defines it. Logits are float32 products, not rounded to the dtype of ``x``.
        """

    def prepare_experts(self, each: Sequence[Mlp], dtype: torch.dtype) -> Any:
        """Convert experts, whose weights are prepared, to the form that `experts` needs; ``dtype``: of activations."""

    def experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        experts: Any,
        activation: Activation,
        add: AddOfTokens | None = None,
    ) -> Tensor:
        """The weighted sum [T, hidden] of what the experts ``indices`` [T, K] return for ``x`` [T, hidden].

        `experts.apply` defines it. An expert that no token has is not read. ``add``: adapters change the experts.
        """

    def prepare_expansion(self, keys: Tensor, values: Tensor) -> Any:
        """Convert the matrices [H, plain, rank] and [H, value, rank] that expand latents to the form that
        `attend_latents` of this backend needs; called once.
        """

    def attend_latents(
        self, query: Tensor, expansion: Any, pages: Tensor, rows: FewTokens, scale: float
    ) -> Tensor:
        """Attention [T, H, value] of rows of few tokens over latents ``pages`` [blocks, size, 1, rank + rotary].

        `latent.absorbed` defines it; ``query`` [T, H, plain + rotary] has the tokens of all rows, rotated.
        """

    def prepare_mixer(self, mixer: Mixer) -> Any:
        """Convert a mixer to the form that this backend's `mix` needs; called once."""

    def mix(
        self, inputs: Sequence[Tensor], mixer: Any, rows: StepRows | LineRows, states: Sequence[Tensor]
    ) -> Tensor:
        """What a mixer returns [T, inner] for the outputs of its linear layers, with the recurrent states of all rows.

        `mixers.mix` defines it. States of rows are read and written in place, as far as they stay.
        """

    def likeliest(self, logits: Tensor) -> Tensor:
        """The first token int64 [S] of the largest logit of each row [S, V], or a fault: see `choice.likeliest`."""

    def likeliest_outputs(self, x: Tensor, weight: Any) -> Tensor:
        """`likeliest` of the `logits` of a head, which need not exist as a whole at any time."""

    def choose(self, logits: Tensor, choice: TokenChoice) -> Tensor:
        """A token int64 [S] sampled from each row of logits [S, V], or a fault: see `choice.choose`.

        Every filter is a threshold on the logit, equals are kept or removed together, and the draw inverts the
        distribution function in the order of the tokens. So a row's token depends only on the row.
        """

    def restrict(self, logits: Tensor, allowed: Allowed) -> Tensor:
        """``logits`` [S, V] with minus infinity in place of the tokens that are not allowed: see `penalties.restrict`.

        What is given stays as it is.
        """

    def penalize(self, logits: Tensor, counts: Tensor, penalty: Penalty) -> None:
        """Penalize rows of ``logits`` float32 [S, V] in place by the counts of tokens int32 [lanes, V]: see
        `penalties.penalize`.
        """

    def accept(self, drawn: Tensor, drafts: Tensor, first: Tensor, offsets: Tensor) -> Tensor:
        """Which of the tokens ``drawn`` count, bool [L], all arguments int64 [L]: see `sampling.choice.counting_of`."""

    def prepare_stack(self, stack: Stack) -> Any:
        """Convert a decoder's layers to the form that this backend's `run_stack` needs; called once."""

    def prepare_adapter(self, layers: LayerChanges, stack: Any) -> Any:
        """Convert an adapter for steps of a prepared ``stack``; its tensors are on the device, in the dtype of
        activations. It may be called on any thread, beside a step.

        `adapters.StepChanges` defines what it adds to the linear layers.
        """

    def step_changes(self, batch: Batch) -> StepChanges:
        """The adapters of a step, for a pass that calls the linear layers one by one."""

    def run_stack(
        self,
        stack: Any,
        batch: Batch,
        pages: Sequence[Pages],
    ) -> Tensor:
        """From tokens to the norm after the last layer: hidden states [S, hidden] of the batch's wanted positions.

        `stack.apply` defines it by calls of the other operations. ``pages`` are those of each layer.
        """

    def prepare_greedy(self, stack: Any, head: Any) -> Greedy | None:
        """`run_stack`, then `likeliest_outputs` of a prepared head, in one call; None: the backend has no such call."""

    def draft(
        self,
        stack: Any,
        head: Any,
        batch: Batch,
        pages: Sequence[Pages],
        most: Counts,
        least: float,
    ) -> Drafted | None:
        """Run the stack, and continue each wanted position, the last one of its row, by up to ``most`` >= 1 likeliest
        tokens.

        A draft ends where the product of its probabilities falls below ``least``, or logits are not finite. The row's
        blocks reach to the end of its draft. None if the backend cannot do it in one call: `drafting.forward` does it
        pass by pass.
        """


def _cpp(device: torch.device, isa: str | None) -> Kernels:
    if device.type != "cpu":
        raise KernelsUnavailable(f"kernels 'cpp' run on the CPU, not on {device}")
    from headrace.compute.kernels.cpp import CppKernels

    return CppKernels(isa)


def _torch(device: torch.device, isa: str | None) -> Kernels:
    if isa is not None:
        raise KernelsUnavailable(f"--cpu-isa {isa}: kernels 'torch' choose their instruction set themselves")
    from headrace.compute.kernels.reference import TorchKernels

    return TorchKernels()


def _triton(device: torch.device, isa: str | None) -> Kernels:
    if isa is not None:
        raise KernelsUnavailable(f"--cpu-isa {isa}: kernels 'triton' run on a GPU")
    try:
        from headrace.compute.kernels.triton.backend import TritonKernels
    except ModuleNotFoundError as error:
        raise KernelsUnavailable(f"kernels 'triton' need the package {error.name}") from error
    return TritonKernels(device)


_BACKENDS: dict[str, Callable[[torch.device, str | None], Kernels]] = {
    "cpp": _cpp,
    "triton": _triton,
    "torch": _torch,
}
"""In the order in which "auto" tries them. Each creates its kernels for a device and an instruction set, or raises
`KernelsUnavailable`."""

_ANY_HEADS = HeadShape(8, 2, 128)


def select(
    name: str,
    device: torch.device,
    isa: str | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: HeadShape = _ANY_HEADS,
) -> Kernels:
    """The backend called ``name``, or with "auto" the fastest that works on ``device``.

    ``isa`` is the instruction set to use, which the "auto" backend must support; None: the best. "auto" takes the
    Triton kernels on a GPU where they agree with torch's operations, for ``heads`` of ``dtype``: see
    `triton.agreement`.

    Raises:
        KernelsUnavailable: the name is unknown, or the backend does not work here.
    """
    if name != "auto":
        if name not in _BACKENDS:
            known = ", ".join(sorted(_BACKENDS))
            raise KernelsUnavailable(f"kernels '{name}' do not exist; use auto or one of: {known}")
        return _BACKENDS[name](device, isa)
    tried = {key: make for key, make in _BACKENDS.items() if key != "triton" or device.type != "cpu"}
    for key, make in tried.items():
        try:
            kernels = make(device, isa)
            if key == "triton":
                _check(kernels, device, dtype, heads)
        except KernelsUnavailable as error:
            if isa is not None:  # no slower backend supports it either
                raise
            if key == "triton":
                logger.warning("%s. Torch's operations compute instead, which is slower", error)
            elif device.type == "cpu":
                _warn_once(str(error))
        else:
            return kernels
    raise KernelsUnavailable(f"no kernels work on {device}")


@cache
def _warn_once(message: str) -> None:
    """Log a warning; every model of a process selects kernels, and one warning is enough."""
    logger.warning("%s", message)


def _check(kernels: Kernels, device: torch.device, dtype: torch.dtype, heads: HeadShape) -> None:
    """Raise KernelsUnavailable if results of the Triton kernels differ from torch's operations."""
    from headrace.compute.kernels.triton.agreement import disagreement

    wrong = disagreement(kernels, dtype, heads, device)
    if wrong:
        raise KernelsUnavailable(f"kernels 'triton' do not work on this device: {wrong}")


def weight_element_bytes(kernels: Kernels, dtype: torch.dtype, stored: str) -> float:
    """The bytes of an element of a linear layer's weight, as the kernels keep it for activations in ``dtype``.

    ``stored``: the dtype of the checkpoint's weights according to its config.
    """
    narrow = kernels.narrow and dtype == torch.float32 and stored == "bfloat16"
    if not narrow and dtype != torch.bfloat16:
        return dtype.itemsize
    return 1.5 if kernels.coded else torch.bfloat16.itemsize


def check_fp8(kernels: Kernels, option: str, value: str | None) -> None:
    """Raise KernelsUnavailable if the ``value`` of an option is fp8 and ``kernels`` do not compute with it."""
    if value == "fp8" and not kernels.fp8:
        raise KernelsUnavailable(
            f"--{option} fp8: kernels '{kernels.name}' do not compute with fp8 on this device; --kernels triton does"
            f" on NVIDIA GPUs of compute capability 8.9 or later. Elsewhere use --{option} int8"
        )
