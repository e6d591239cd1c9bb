"""What a decode step launches is what the static model of a step says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.compute.kernels.stack import Stack
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.lab.plan.launches import TORCH, TRITON, Kernels
from tests.compute.kernels.pages import CPU, ORACLE
from tests.compute.kernels.test_stack import DECODING, make, pages_for
from tests.compute.kernels.triton.launches import Launches

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
@pytest.mark.parametrize(("told", "kernels"), BACKENDS, ids=["torch", "triton"])
def test_layers(
    told: Kernels, kernels: Any, page_dtype: torch.dtype, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make(kernels, torch.bfloat16, "plain", rich=normed)
    # Biases, windows and soft caps are no operations of their own in the models that are planned.
    bare = replace(stack.layers[-1], window=None, rope=0)
    stack = replace(stack, layers=(bare,), ropes=stack.ropes[:1], embedding_scale=1.0, softcap=None)
    one, two = (count(kernels, stack, layers, page_dtype, monkeypatch) for layers in (1, 2))
    integers = page_dtype == torch.int8
    assert two - one == (
        told.layer + told.integer * integers + (told.head_norm + 2 * told.post_norm) * normed
    )
    assert one - (two - one) == told.step


@pytest.mark.parametrize(("told", "kernels"), BACKENDS, ids=["torch", "triton"])
def test_sampling(told: Kernels, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = kernels.prepare_linear(torch.randn(256, 32).to(torch.bfloat16))
    hidden = torch.randn(2, 32).to(torch.bfloat16)
    with torch.no_grad(), monkeypatch.context() as patch, Launches(patch) as launched:
        kernels.likeliest(kernels.linear(hidden, head))
    assert len(launched.names) == told.sampling, launched.names
