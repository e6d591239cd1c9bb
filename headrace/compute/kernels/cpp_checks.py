"""The arguments of the C++ kernels: dtype codes, checked pages and batches, and loading the extension."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import Activation, HeadNorm, HeadShape, KernelsUnavailable, Pages


class Codes(dict[torch.dtype, int]):
    """The extension's numbers of dtypes (`DType` in csrc/operations.h)."""

    def __missing__(self, dtype: torch.dtype) -> int:
        raise ValueError(f"kernels 'cpp' support {', '.join(map(str, self))}, not {dtype}")


DTYPES = Codes({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
PAGE_DTYPES = Codes({**DTYPES, torch.int8: 3})
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "squared_relu": 3}
"""The extension's numbers of activations (`Activation` in csrc/operations.h)."""
HEAD_NORMS: dict[HeadNorm, int] = {"head": 0, "projection": 1, "rotated": 2, "values": 3}
"""The extension's numbers of norms (`HeadNorm` in csrc/operations.h)."""
_INTERFACE = 34
ALL_KEYS = 2**62
"""The window of a layer whose tokens attend to all keys."""
NEVER = {torch.float32: 0xFF800000, torch.bfloat16: 0xFF80, torch.float16: 0xFC00}
"""The bits of minus infinity."""
_PAIRED = (torch.bfloat16, torch.int8)
_MAX_HEAD_DIM = 512
_PACKAGE = Path(__file__).parents[2]


def check_cpu(*tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are in the memory of the CPU, where their addresses mean something."""
    for each in tensors:
        if each is not None and not each.is_cpu:
            raise ValueError(f"kernels 'cpp' run on the CPU, not on {each.device}")


def page_words(pages: Pages, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Pages as the extension needs them (`Pages` in csrc/operations.h), checked; ``dtype``: of the activations."""
    keys, values, key_scales, value_scales, _ = pages
    check_cpu(keys, values, key_scales, value_scales)
    narrow = dtype == torch.float32 and keys.dtype == torch.bfloat16
    if not (narrow or keys.dtype in (dtype, torch.int8)) or (head_dim % 2 and keys.dtype in _PAIRED):
        raise ValueError(f"pages of {keys.dtype} with heads of {head_dim} beside activations of {dtype}")
    num_blocks, block_size = keys.shape[:2]
    block = (block_size * kv_heads * head_dim, kv_heads * head_dim, head_dim, 1)
    if (
        values.shape != keys.shape
        or values.dtype != keys.dtype
        or keys.shape[2:] != (kv_heads, head_dim)
        or head_dim > _MAX_HEAD_DIM
        or values.stride() != keys.stride()
        or keys.stride()[1:] != block[1:]
        or keys.stride(0) < block[0]
    ):
        raise ValueError(
            f"keys {keys.dtype} {list(keys.shape)} and values {values.dtype} {list(values.shape)} must be pages of "
            f"{kv_heads} heads of {head_dim}, at most {_MAX_HEAD_DIM}, each block contiguous"
        )
    addresses = (keys.data_ptr(), values.data_ptr())
    code = PAGE_DTYPES[keys.dtype]
    if keys.dtype != torch.int8:
        return (*addresses, 0, 0, block_size, keys.stride(0), 0, code)
    if (
        key_scales is None
        or value_scales is None
        or any(scales.dtype != torch.float32 for scales in (key_scales, value_scales))
        or any(scales.shape != (num_blocks, kv_heads, block_size) for scales in (key_scales, value_scales))
        or key_scales.stride() != value_scales.stride()
        or key_scales.stride()[1:] != (block_size, 1)
    ):
        raise ValueError(
            f"pages of int8 need scales float32 [{num_blocks}, {kv_heads}, {block_size}], each block contiguous"
        )
    scales = (key_scales.data_ptr(), value_scales.data_ptr())
    return (*addresses, *scales, block_size, keys.stride(0), key_scales.stride(0), code)


def batch_lines(batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The tokens of a batch, and its positions, slots and wanted positions, contiguous and checked."""
    check_cpu(batch.tokens, batch.positions, batch.slot_mapping, batch.logits_indices)
    ids = batch.tokens.contiguous()
    lines = [each.contiguous() for each in (batch.positions, batch.slot_mapping, batch.logits_indices)]
    if ids.dtype != torch.int32 or any(line.dtype != torch.int64 for line in lines):
        raise ValueError(f"tokens {ids.dtype}; positions, slots, wanted {[line.dtype for line in lines]}")
    if not len(lines[0]) == len(lines[1]) == len(ids):
        raise ValueError(f"{len(lines[0])} positions and {len(lines[1])} slots for {len(ids)} tokens")
    return ids, lines


def joint_address(batch: Batch) -> int:
    """Where the flags of joint rows are; 0: there are none."""
    if batch.joint is None:
        return 0
    check_cpu(batch.joint)
    if batch.joint.dtype != torch.uint8 or len(batch.joint) != len(batch.context_lens):
        raise ValueError(f"{batch.joint.dtype} {list(batch.joint.shape)} for {len(batch.context_lens)} rows")
    return batch.joint.data_ptr()


def row_lines(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a batch, contiguous and checked: query starts, context lengths and block tables."""
    check_cpu(batch.query_starts, batch.context_lens, batch.block_tables)
    starts, contexts, tables = lines = (
        batch.query_starts.contiguous(),
        batch.context_lens.contiguous(),
        batch.block_tables.contiguous(),
    )
    rows = len(tables)
    if any(line.dtype != torch.int32 for line in lines) or (len(starts), len(contexts)) != (rows + 1, rows):
        raise ValueError(f"rows of a batch do not fit: {[(line.dtype, list(line.shape)) for line in lines]}")
    return lines


def check_blocks(read: int, batch_block_size: int, num_blocks: int, block_size: int) -> None:
    """Raise IndexError if rows read blocks below ``read`` that the pages do not have, or of another size."""
    if read > num_blocks or batch_block_size != block_size:
        raise IndexError(
            f"rows read block {read - 1} of {batch_block_size} tokens; there are {num_blocks} of {block_size}"
        )


def check_rope(
    qkv: Tensor,
    shape: HeadShape,
    rotation: Tensor,
    qk_norm: Tensor | None,
    slots: Tensor,
    head_norm: HeadNorm = "head",
) -> None:
    """Raise ValueError unless the arguments of `Kernels.rope_write_kv` fit each other."""
    check_cpu(qkv, rotation, qk_norm, slots)
    tokens, rotary = len(qkv), rotation.shape[-1]
    heads, kv_heads, head_dim = shape
    normed = heads + (2 * kv_heads if head_norm == "values" else kv_heads)
    if (
        qkv.shape[1] != (heads + 2 * kv_heads) * head_dim
        or rotation.shape != (tokens, 2, rotary)
        or rotation.dtype != torch.float32
        or rotary > head_dim
        or rotary % 2
        or (kv_heads and heads % kv_heads)
        or len(slots) != tokens
        or slots.dtype != torch.int64
        or (qk_norm is not None and (qk_norm.shape != (normed, head_dim) or qk_norm.dtype != torch.float32))
    ):
        raise ValueError(
            f"qkv {list(qkv.shape)}, rotation {rotation.dtype} {list(rotation.shape)}, slots {slots.dtype} "
            f"{list(slots.shape)} do not fit {shape}"
        )


def shown(tensor: Tensor | None) -> str:
    """Dtype and shape of a tensor for an error message."""
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def extension() -> Any:
    """The extension module, if it was built from these sources."""
    try:
        module = importlib.import_module("headrace.compute.kernels._cpu")
        if getattr(module, "interface", 1) != _INTERFACE:
            raise ImportError("they were built from a different version of the sources")
        return module
    except ImportError as error:
        raise KernelsUnavailable(
            f"the C++ kernels of the CPU cannot be loaded from {_PACKAGE} ({error}); torch is used instead, which is"
            f" 1.5 to 3 times slower. {_remedy()}"
        ) from error


def _remedy() -> str:
    """How to get the extension: it is optional in the build, so that a compiler may be there and the kernels not."""
    source = (_PACKAGE.parent / "setup.py").is_file()
    build = "pip install --force-reinstall --no-cache-dir --no-binary headrace headrace"
    if source:
        build = f"cd {_PACKAGE.parent} && python setup.py build_ext --inplace"
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        return f"To build them, install a C++17 compiler and run `{build}`"
    return f"A compiler is here ({compiler}): to build them, run `{build}`"
