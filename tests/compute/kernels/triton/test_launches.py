"""What a decode step launches is what the static model of a step says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.compute.kernels import HeadShape
from headrace.compute.kernels.stack import Stack
from headrace.compute.kernels.triton import quantized
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.lab.plan.launches import KERNEL_ROWS, TORCH, TRITON, Kernels, few_bits
from headrace.lab.plan.roofline import ModelShape
from tests.compute.kernels import test_stack
from tests.compute.kernels.pages import CPU, ORACLE
from tests.compute.kernels.test_stack import BLOCK, DECODING, make, pages_for
from tests.compute.kernels.triton.launches import Launches
from tests.oracle.harness import pack

BACKENDS = [(TORCH, ORACLE), (TRITON, TritonKernels(CPU))]


def count(
    kernels: Any, stack: Stack, layers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> int:
    some = replace(stack, layers=stack.layers[-1:] * layers)
    pages = pages_for(dtype)[:layers]
    with torch.no_grad(), monkeypatch.context() as patch, Launches(patch) as launched:
        kernels.run_stack(some, DECODING, pages)
    return len(launched.names)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("reported", "kernels"), BACKENDS, ids=["torch", "triton"])
def test_layers(
    reported: Kernels, kernels: Any, page_dtype: torch.dtype, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make(kernels, torch.bfloat16, "plain", rich=normed)
    # Biases, windows, sinks and soft caps are no operations of their own in the models that are planned.
    bare = replace(stack.layers[-1], window=None, rope=0, sinks=None)
    stack = replace(stack, layers=(bare,), ropes=stack.ropes[:1], embedding_scale=1.0, softcap=None)
    one, two = (count(kernels, stack, layers, page_dtype, monkeypatch) for layers in (1, 2))
    integers = page_dtype == torch.int8
    assert two - one == (
        reported.layer + reported.integer * integers + (reported.head_norm + 2 * reported.post_norm) * normed
    )
    assert one - (two - one) == reported.step


@pytest.mark.parametrize(
    ("kind", "name", "rows"),
    [("W4A16", "int4", 1), ("W8A8", "int8", 1), ("W8A8", "int8", 2), ("fp8", "fp8", 2)],
)
def test_layers_of_few_bits(kind: str, name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row by the kernel for such weights, two by the library."""
    heads = HeadShape(8, 4, 128)
    shape = ModelShape("small", 1, 1024, *heads, 1024, 24)
    monkeypatch.setattr(test_stack, "HIDDEN", 1024)
    for limit in ("MOST_ROWS", "MOST_INTEGER_ROWS", "MOST_FP8_ROWS"):
        monkeypatch.setattr(quantized, limit, 1)
    kernels = TritonKernels(CPU)
    monkeypatch.setattr(kernels, "_target", kernels._target._replace(processors=132))
    stack = make(kernels, torch.bfloat16, kind, heads=heads, inner=1024)
    batch = pack([3] * rows, [3, 2][:rows], [1] * rows, [[1], [2]][:rows], [*range(rows)], BLOCK, CPU)
    counts = []
    for layers in (1, 2):
        some = replace(stack, layers=stack.layers[-1:] * layers)
        pages = pages_for(torch.bfloat16, heads)[:layers]
        with torch.no_grad(), monkeypatch.context() as patch, Launches(patch) as launched:
            kernels.run_stack(some, batch, pages)
        counts.append(len(launched.names))
    added = few_bits(shape, name, KERNEL_ROWS[name] + rows - 1)
    assert counts[1] - counts[0] == TRITON.layer + added


def test_the_model_knows_which_product_is_chosen() -> None:
    limits = (quantized.MOST_ROWS, quantized.MOST_INTEGER_ROWS, quantized.MOST_FP8_ROWS)
    assert limits == tuple(KERNEL_ROWS[name] for name in ("w4a8", "int8", "fp8"))


@pytest.mark.parametrize(("reported", "kernels"), BACKENDS, ids=["torch", "triton"])
def test_sampling(reported: Kernels, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = kernels.prepare_linear(torch.randn(256, 32).to(torch.bfloat16))
    hidden = torch.randn(2, 32).to(torch.bfloat16)
    with torch.no_grad(), monkeypatch.context() as patch, Launches(patch) as launched:
        kernels.likeliest(kernels.linear(hidden, head))
    assert len(launched.names) == reported.sampling, launched.names
