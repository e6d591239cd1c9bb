"""What the launches must know about a device: its processors, its shared memory, and its matrix products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.triton.fp8 import Way, way_of

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
    its library multiplies fp8.
    """

    name: str
    processors: int
    shared_bytes: int
    fp8: Way | None = None

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
    return Target(properties.name, properties.multi_processor_count, shared, way_of(device))


def power(count: int, least: int = 16) -> int:
    """The smallest power of two that is at least ``count`` and ``least``."""
    return max(least, 1 << (count - 1).bit_length())
