"""The CPU's C++ kernels: checks tensors, passes their addresses to the extension module `_cpu`.

What each call means is said in `Kernels`. The extension's own checks refuse slots and blocks outside the pages;
here are those of dtype and layout. Few Python operations per call: a small model's step is mostly these.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headrace.compute.batch import Batch
from headrace.compute.kernels import Activation, HeadShape, KernelsUnavailable

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MAX_HEAD_DIM = 512
_ALL_KEYS = 2**62


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs] in panels of columns, as `csrc/matrix.h` reads it; ``packed`` owns the memory."""

    packed: Tensor
    address: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    code: int


class AttentionPlan(NamedTuple):
    """A step's rows as the extension wants them; ``batch`` keeps the memory alive."""

    batch: Batch
    rows: tuple[int, ...]
    tokens: int
    blocks: int


class CppKernels:
    """Vectorized kernels for x86-64 (AVX-512 with bfloat16 products, AVX-512, AVX2) and any other CPU.

    Args:
        level: which of the machine's instruction sets to use (`levels`); None: the best.

    Raises:
        KernelsUnavailable: the extension is not built or does not fit torch's OpenMP, or the level is not here.
    """

    name = "cpp"

    def __init__(self, level: str | None = None) -> None:
        self._cpu = _extension()
        supported: dict[str, int] = self._cpu.supported_levels()
        self.levels = tuple(supported)
        self.level = self.levels[0] if level is None else level
        if self.level not in supported:
            raise KernelsUnavailable(f"level '{level}' is not on this machine; it has {', '.join(supported)}")
        self._level = supported[self.level]
        self._panel: int = self._cpu.panel(self._level)

    def prepare_linear(self, weight: Tensor) -> PackedWeight | Tensor:
        outputs, inputs = weight.shape
        if weight.dtype == torch.float32:
            words = weight
        elif weight.dtype == torch.bfloat16 and inputs % 2 == 0:
            words = weight.contiguous().view(torch.int32)
        else:
            return weight
        panels = -(-outputs // self._panel)
        packed = words.new_zeros((panels, words.shape[1], self._panel))
        whole = outputs // self._panel
        packed[:whole] = words[: whole * self._panel].unflatten(0, (whole, self._panel)).transpose(1, 2)
        if whole < panels:
            packed[whole, :, : outputs % self._panel] = words[whole * self._panel :].T
        return PackedWeight(packed, packed.data_ptr(), inputs, outputs, weight.dtype, _DTYPES[weight.dtype])

    def linear(self, x: Tensor, weight: PackedWeight | Tensor, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return functional.linear(x, weight, bias)
        _, packed, inputs, outputs, dtype, code = weight
        count, width = x.shape
        if width != inputs or x.dtype != dtype:
            raise ValueError(f"linear of {x.dtype} [{count}, {width}] by {dtype} [{outputs}, {inputs}]")
        x = x.contiguous()
        out = x.new_empty((count, outputs))
        self._cpu.linear(
            self._level,
            x.data_ptr(),
            packed,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            count,
            inputs,
            outputs,
            code,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._cpu.norm(
            self._level,
            x.data_ptr(),
            0,
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // size,
            size,
            _DTYPES[x.dtype],
            eps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        residual = residual.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._cpu.norm(
            self._level,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // size,
            size,
            _DTYPES[x.dtype],
            eps,
        )
        return out, residual

    def rope_write_kv(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotation: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        qkv, rotation, slots = qkv.contiguous(), rotation.contiguous(), slots.contiguous()
        tokens = len(qkv)
        heads, kv_heads, head_dim = shape
        num_blocks, block_size, _, _ = keys.shape
        queries = qkv.new_empty((tokens, heads, head_dim))
        self._cpu.rope_write_kv(
            self._level,
            qkv.data_ptr(),
            rotation.data_ptr(),
            0 if qk_norm is None else qk_norm.data_ptr(),
            slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            queries.data_ptr(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            rotation.shape[-1],
            num_blocks * block_size,
            _DTYPES[qkv.dtype],
            _DTYPES[keys.dtype],
            eps,
        )
        return queries

    def plan_attention(self, batch: Batch, window: int | None, dtype: torch.dtype) -> AttentionPlan:
        # Also tells this thread's OpenMP how many threads torch uses; torch itself does so at its first parallel loop.
        torch.get_num_threads()
        rows, width = batch.block_tables.shape
        starts, contexts, tables = (
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.block_tables.data_ptr(),
        )
        sizes = (rows, width, batch.block_size, _ALL_KEYS if window is None else window)
        blocks = self._cpu.check_rows(starts, contexts, tables, *sizes)
        return AttentionPlan(batch, (starts, contexts, tables, *sizes), len(batch.positions), blocks)

    def paged_attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        queries = queries.contiguous()
        tokens, heads, head_dim = queries.shape
        num_blocks, _, kv_heads, _ = keys.shape
        if plan.blocks > num_blocks or plan.tokens != tokens:
            raise IndexError(
                f"the plan reads block {plan.blocks - 1} for {plan.tokens} tokens; the pages have {num_blocks} "
                f"blocks, and there are {tokens} queries"
            )
        out = queries.new_empty((tokens, heads * head_dim))
        self._cpu.attention(
            self._level,
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            *plan.rows,
            heads,
            kv_heads,
            head_dim,
            _DTYPES[queries.dtype],
            _DTYPES[keys.dtype],
            scale,
            0.0 if softcap is None else softcap,
        )
        return out

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = gate_up.contiguous()
        count, double = gate_up.shape
        out = gate_up.new_empty((count, double // 2))
        self._cpu.gated_activation(
            self._level,
            gate_up.data_ptr(),
            out.data_ptr(),
            count,
            double // 2,
            _DTYPES[gate_up.dtype],
            activation != "silu",
        )
        return out


def _extension() -> Any:
    """The extension module; torch, imported above, has loaded the OpenMP runtime that its symbols resolve to."""
    try:
        return importlib.import_module("headrace.compute.kernels._cpu")
    except ImportError as error:
        raise KernelsUnavailable(
            f"the C++ kernels of the CPU cannot be loaded ({error}); computing falls back to torch, several times "
            "slower for small models. A C++17 compiler and `pip install --no-build-isolation -e .` build them."
        ) from error
