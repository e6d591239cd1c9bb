"""What the launches must know about a device: its processors, its shared memory, and its matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.quantization.weight import FP8, QuantizedWeight

# Products of fp8 by `torch._scaled_mm`, with a scale for each row and each output, or without scales where the device
# does not take these.
#
# Neither torch's documentation nor a capability says which of them a build has, so a small product is tried.

Way = Literal["rows", "sums"]
_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""Both sides of a weight must be multiples of it."""


def way_of(device: torch.device) -> Way | None:
    """How ``device`` multiplies fp8: with the scales of rows and outputs, to sums without scales, or not at all."""
    if device.type == "cuda" and (
        torch.version.hip or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY
    ):
        return None
    values = torch.ones((_MULTIPLE, _MULTIPLE), device=device).to(FP8)
    scales = torch.ones((_MULTIPLE, 1), device=device)
    weight = QuantizedWeight(values, scales, None, None, 8, 8)
    ways: dict[Way, Callable[[], Tensor]] = {
        "rows": lambda: scaled(values, scales.view(-1), weight, None),
        "sums": lambda: sums(values, weight),
    }
    for way, product in ways.items():
        try:
            product()
        except (RuntimeError, ValueError):  # the latter where the shapes of scales are not known
            continue
        return way
    return None


def fits(weight: QuantizedWeight) -> bool:
    """Whether the library takes a weight of this shape."""
    return all(size % _MULTIPLE == 0 for size in weight.shape)


def scaled(x: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in bfloat16, the only type that every build takes, for rows in fp8 [T, in] with
    ``scales`` [T].
    """
    factors = scales[:, None], weight.scales.t()
    return torch._scaled_mm(x, weight.values.t(), *factors, bias, out_dtype=torch.bfloat16)


def sums(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The sums of products [T, out] in float32, without any scale."""
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return torch._scaled_mm(x, weight.values.t(), one, one, out_dtype=torch.float32)


_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
}
_INTERPRETED = "interpreter"


class Target(NamedTuple):
    """A device, or the interpreter that runs kernels on CPU tensors to test them.

    ``processors`` run programs side by side, each with ``shared_bytes`` of memory for its tiles. ``fp8`` says how
    its library multiplies fp8, ``tf32`` whether it multiplies tiles of float32 that are rounded to TF32.
    """

    name: str
    processors: int
    shared_bytes: int
    fp8: Way | None = None
    tf32: bool = False

    def dot(self, dtype: torch.dtype) -> Any:
        """The type in which tiles of ``dtype`` are multiplied.

        The interpreter stores bfloat16 as integers and would multiply these, so it multiplies in float32.
        """
        if self.name == _INTERPRETED and dtype == torch.bfloat16:
            return tl.float32
        return _DTYPES[dtype]


INTERPRETER = Target(_INTERPRETED, 8, 227 << 10)
"""Few processors, so that tests split some rows over several programs and others not."""


def target_of(device: torch.device) -> Target:
    """The target of ``device``.

    Raises:
        KernelsUnavailable: Triton cannot run there.
    """
    if device.type == "cpu":
        if not triton.knobs.runtime.interpret:
            raise KernelsUnavailable(
                "kernels 'triton' run on a GPU; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1), for tests"
            )
        return INTERPRETER._replace(fp8=way_of(device))
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 64 << 10)
    tf32 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return Target(properties.name, properties.multi_processor_count, shared, way_of(device), tf32)


def power(count: int, least: int = 16) -> int:
    """The smallest power of two that is at least ``count`` and ``least``."""
    return max(least, 1 << (count - 1).bit_length())
