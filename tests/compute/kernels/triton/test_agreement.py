"""Before `auto` takes the Triton kernels, they must agree with torch's operations; one that does not is named."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from headrace.compute import kernels
from headrace.compute.kernels import HeadShape, Kernels, select
from headrace.compute.kernels.triton import attention, elementwise, linear, sampling
from headrace.compute.kernels.triton.agreement import disagreement
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_that_agree_are_used(gpu: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(gpu, dtype).name == "triton"
    assert not caplog.records


def test_a_cpu_does_not_take_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kernels._BACKENDS, "cpp")
    assert select("auto", CPU).name == "torch"


WRONG: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "attention": (attention, "attend", {"scale": 2.0}, "attention"),
    "join": (attention, "join", {"splits": 1}, "attention"),
    "norm": (elementwise, "norm", {"eps": 9.0}, "norm"),
    "rotation": (elementwise, "rope_write", {"eps": 9.0}, "rotation"),
    "activation": (elementwise, "gated", {"SILU": False}, "activation"),
    "product": (linear, "multiply", {"BIAS": False}, "product"),
    "penalties": (sampling, "penalize", {"IN_PROMPT": 1 << 29}, "penalties"),
}
"""Kernels that are launched with a wrong argument, and what the warning names."""


@pytest.mark.parametrize("kernel", WRONG)
def test_a_wrong_kernel_is_named_and_torch_is_used(
    kernel: str, gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    module, name, change, named = WRONG[kernel]
    planted, run = getattr(module, name), InterpretedFunction.run

    def wrong(launched: Any, *args: Any, **kwargs: Any) -> Any:
        if launched is planted:
            places = {each: number for number, each in enumerate(launched.arg_names)}
            given = list(args)
            for each, value in change.items():
                if each in kwargs:
                    kwargs[each] = value
                else:
                    given[places[each]] = value
            args = tuple(given)
        return run(launched, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", wrong)
    with caplog.at_level(logging.WARNING):
        assert chosen(gpu).name == "torch"
    (record,) = caplog.records
    assert "kernels 'triton' do not work on this device" in record.getMessage()
    assert f"{named}" in record.getMessage()
    assert "another result than torch's. Torch's operations compute instead" in record.getMessage()


def test_a_kernel_that_does_not_compile_is_named(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise OSError("no C compiler\nfound")

    monkeypatch.setattr(TritonKernels, "likeliest", broken)
    assert chosen(gpu).name == "torch"
    assert "likeliest token: OSError: no C compiler." in caplog.text


def test_no_numbers_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of NaN is no result, although no comparison finds it too large."""

    def nothing(self: TritonKernels, x: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.full_like(x, torch.nan)

    monkeypatch.setattr(TritonKernels, "rms_norm", nothing)
    assert disagreement(TritonKernels(CPU), torch.float32, HEADS, CPU).startswith("norm: another result")
