"""The Triton backend as a whole: a stack's steps against torch's, and where it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import triton

from headrace.compute.batch import Batch, StepInterrupt, StepInterrupted
from headrace.compute.kernels import KernelsUnavailable, Pages, select
from headrace.compute.kernels.stack import apply
from headrace.compute.kernels.triton.backend import TritonKernels
from tests.compute.kernels.pages import CPU, ORACLE, close
from tests.compute.kernels.stacks import (
    AXES,
    DECODING,
    MIXED,
    PROMPTS,
    make,
    pages_for,
    with_experts,
    with_images,
    with_joint_rows,
)

KERNELS = TritonKernels(CPU)


def exact(pages: Sequence[Pages]) -> torch.Tensor:
    return torch.stack([torch.stack((each.keys, each.values)) for each in pages])


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("kind", ["plain", "W4A16"])
def test_a_stack_is_the_same_as_by_torch(kind: str, rich: bool) -> None:
    written = pages_for(torch.float32), pages_for(torch.float32)
    ours, theirs = (make(kernels, torch.float32, kind, rich, inner=64) for kernels in (KERNELS, ORACLE))
    for batch in (PROMPTS, MIXED, DECODING):
        actual = KERNELS.run_stack(KERNELS.prepare_stack(ours), batch, written[0])
        close(actual, apply(ORACLE, theirs, batch, written[1]), torch.float32, least=1e-4)
    close(exact(written[0]), exact(written[1]), torch.float32, least=1e-4)


def test_layers_with_experts_are_the_same_as_by_torch() -> None:
    written = pages_for(torch.float32), pages_for(torch.float32)
    ours, theirs = (with_experts(kernels, make(kernels, torch.float32)) for kernels in (KERNELS, ORACLE))
    for batch in (PROMPTS, MIXED, DECODING):
        actual = KERNELS.run_stack(KERNELS.prepare_stack(ours), batch, written[0])
        close(actual, apply(ORACLE, theirs, batch, written[1]), torch.float32, least=1e-4)
    close(exact(written[0]), exact(written[1]), torch.float32, least=1e-4)


@pytest.mark.parametrize("rotated", [False, True])
def test_images_are_the_same_as_by_torch(rotated: bool) -> None:
    """Only rows, or also positions of three kinds and rows behind layers."""
    written = pages_for(torch.float32), pages_for(torch.float32)
    ours, theirs = (
        replace(make(kernels, torch.float32, inner=64), axes=AXES) for kernels in (KERNELS, ORACLE)
    )
    for batch in (PROMPTS, MIXED):
        given = with_images(batch, torch.float32)
        if not rotated:
            assert given.features is not None
            given = replace(given, axes=None, features=given.features._replace(deep=None))
        actual = KERNELS.run_stack(KERNELS.prepare_stack(ours), given, written[0])
        close(actual, apply(ORACLE, theirs, given, written[1]), torch.float32, least=1e-4)
    close(exact(written[0]), exact(written[1]), torch.float32, least=1e-4)


def test_joint_rows_are_the_same_as_by_torch() -> None:
    written = pages_for(torch.float32), pages_for(torch.float32)
    for batch in (PROMPTS, MIXED):
        ours, given = with_joint_rows(make(KERNELS, torch.float32, inner=64), batch)
        theirs, _ = with_joint_rows(make(ORACLE, torch.float32, inner=64), batch)
        actual = KERNELS.run_stack(KERNELS.prepare_stack(ours), given, written[0])
        close(actual, apply(ORACLE, theirs, given, written[1]), torch.float32, least=1e-4)
    close(exact(written[0]), exact(written[1]), torch.float32, least=1e-4)


def test_an_interrupt_ends_a_step_after_a_layer() -> None:
    interrupt = StepInterrupt()
    interrupt.set()
    batch: Batch = replace(DECODING, interrupt=interrupt)
    with pytest.raises(StepInterrupted):
        KERNELS.run_stack(make(KERNELS, torch.float32), batch, pages_for(torch.float32))


def test_on_a_cpu_it_works_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("triton", CPU).name == "triton"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(KernelsUnavailable, match="'triton' run on a GPU"):
        select("triton", CPU)
    with pytest.raises(KernelsUnavailable, match=r"--cpu-isa avx2: kernels 'triton' run on a GPU"):
        select("triton", CPU, "avx2")
