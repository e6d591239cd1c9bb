"""What a decode step launches is what the static model of a step says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.compute.kernels import HeadShape
from headrace.compute.kernels.experts import Mixture, Router, Routing
from headrace.compute.kernels.stack import Stack
from headrace.compute.kernels.triton import quantized
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.core.capacity import SparseLayers
from headrace.lab.plan.launches import KERNEL_ROWS, TORCH, TRITON, Kernels, few_bits
from headrace.lab.plan.roofline import ModelShape
from tests.compute.kernels import stacks
from tests.compute.kernels.pages import CPU, ORACLE
from tests.compute.kernels.stacks import BLOCK, DECODING, HEADS, make, pages_for
from tests.compute.kernels.test_experts import mlps
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
    monkeypatch.setattr(stacks, "HIDDEN", 1024)
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


@pytest.mark.parametrize(("rows", "chosen"), [(1, 2), (2, 4)])
@pytest.mark.parametrize(("kind", "name"), [("plain", None), ("W8A8", "int8")])
@pytest.mark.parametrize(("reported", "kernels"), BACKENDS, ids=["torch", "triton"])
def test_layers_with_experts(
    reported: Kernels,
    kernels: Any,
    kind: str,
    name: str | None,
    rows: int,
    chosen: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that two tokens can have are hit; the products of attention are plain."""
    if name is not None and reported is TORCH:
        return
    monkeypatch.setattr(stacks, "HIDDEN", 64)
    stack = make(kernels, torch.bfloat16, "plain")
    each = mlps(kernels, 4, torch.bfloat16, kind, hidden=64, width=32)
    router = Router(torch.randn(4, 64).bfloat16(), None, Routing(4, chosen))
    feed = Mixture(kernels.prepare_router(router), kernels.prepare_experts(each, torch.bfloat16))
    bare = replace(stack.layers[-1], window=None, rope=0, sinks=None, feed=feed)
    stack = replace(stack, ropes=stack.ropes[:1], embedding_scale=1.0, softcap=None)
    batch = pack([3] * rows, [3, 2][:rows], [1] * rows, [[1], [2]][:rows], [*range(rows)], BLOCK, CPU)
    counts = []
    for layers in (1, 2):
        some, pages = replace(stack, layers=(bare,) * layers), pages_for(torch.bfloat16)[:layers]
        with torch.no_grad(), monkeypatch.context() as patch, Launches(patch) as launched:
            kernels.run_stack(some, batch, pages)
        counts.append(len(launched.names))
    shape = ModelShape("small", 1, 64, *HEADS, 8, 24, sparse=SparseLayers(1, 4, chosen, 1))
    plain = reported.operations(replace(shape, sparse=None), rows=rows)
    mixture = reported._mixture(SparseLayers(1, 4, chosen, 1), name, rows)
    outside = reported.step + reported.sampling + reported.packing
    assert counts[1] - counts[0] == plain - outside + mixture - (2 if reported is TORCH and rows == 1 else 0)


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
