"""Before `auto` takes the Triton kernels, they must agree with torch's operations; those that do not are named."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from headrace.compute import kernels
from headrace.compute.kernels import HeadShape, Kernels, select
from headrace.compute.kernels.triton import attention, elementwise, linear, sampling
from headrace.compute.kernels.triton.backend import TritonKernels
from tests.compute.kernels.pages import CPU

HEADS = HeadShape(4, 2, 16)


class FakeGpu:
    """A device that is none of torch's, so that only the kernels and the check see it."""

    type = "cuda"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device on which the kernels run in the interpreter."""
    monkeypatch.setitem(kernels._BACKENDS, "triton", lambda device, isa: TritonKernels(CPU))
    check = kernels._check
    monkeypatch.setattr(kernels, "_check", lambda found, device, *rest: check(found, CPU, *rest))
    return FakeGpu()


def chosen(gpu: Any, dtype: torch.dtype = torch.float32) -> Kernels:
    return select("auto", gpu, dtype=dtype, heads=HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_agree_are_used(gpu: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(gpu, dtype).name == "triton"
    assert not caplog.records


def test_a_cpu_does_not_take_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    # Undoing a deletion would put the entry last, and "auto" tries them in their order.
    others = {name: make for name, make in kernels._BACKENDS.items() if name != "cpp"}
    monkeypatch.setattr(kernels, "_BACKENDS", others)
    assert select("auto", CPU).name == "torch"


def plant(patch: pytest.MonkeyPatch, changes: dict[Any, dict[str, Any]]) -> None:
    """Launch some kernels with wrong arguments."""
    run = InterpretedFunction.run

    def wrong(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for name, value in changes.get(kernel, {}).items():
            if name in kwargs:
                kwargs[name] = value
            else:
                given[kernel.arg_names.index(name)] = value
        return run(kernel, *given, **kwargs)

    patch.setattr(InterpretedFunction, "run", wrong)


def warning(gpu: Any, caplog: pytest.LogCaptureFixture) -> str:
    """The one warning with which torch is chosen."""
    with caplog.at_level(logging.WARNING):
        assert chosen(gpu).name == "torch"
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("kernels 'triton' do not work on this device: ")
    assert said.endswith(". Torch's operations compute instead, which is slower")
    return said


def test_wrong_kernels_are_named_and_torch_is_used(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise OSError("no C compiler\nfound")

    def no_numbers(self: TritonKernels, x: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.full_like(x, torch.nan)

    monkeypatch.setattr(TritonKernels, "likeliest", broken)
    monkeypatch.setattr(TritonKernels, "rms_norm", no_numbers)
    changes = {
        attention.attend: {"scale": 2.0},
        elementwise.rope_write: {"eps": 9.0},
        elementwise.gated: {"KIND": 1},
        linear.multiply: {"BIAS": False},
        sampling.penalize: {"IN_PROMPT": 2},
    }
    plant(monkeypatch, changes)
    said = warning(gpu, caplog)
    assert "likeliest token: OSError: no C compiler;" in said
    for name in (
        "norm",
        "attention",
        "attention behind a shared prefix",
        "rotation",
        "rotation with int8 keys",
        "activation",
        "product W4A16",
        "product W8A8",
        "penalties",
        "all layers of W8A8",
    ):
        assert f"{name}: another result than torch's" in said
    for name in ("norm of a sum", "sampling", "allowed tokens"):  # these are as they were
        assert f"; {name}:" not in said
        assert f": {name}:" not in said
