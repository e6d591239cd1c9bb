"""A model of a decode step on a GPU: kernel launches, bytes, and the expected time, computed without a GPU.

```
 host     operations x the time to launch one                      (Python launches them one by one)
 device   products:  max(bytes of weights / reached bandwidth, arithmetic / reached rate)
          attention: bytes of keys and values / reached bandwidth
          plus the idle time of the device per operation
 step     max(host, device)
```
A decode step in a CUDA graph is one launch of all its operations: the host packs rows and queues two copies. A test
compares the counts with the launches of the code. On an H200, the model is within 12 % of the measured times of CUDA
graphs of Qwen3-0.6B and Llama-3.1-8B at batch sizes 1 to 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from headrace.core.capacity import SparseLayers
from headrace.lab.plan.roofline import ModelShape, Replica, decoding

_PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200. The kernels split a product's inputs depending on this number."""
_COLUMNS, _TILE_ROWS = 64, 64
"""Output columns and rows that one program of the quantized kernels computes."""
KERNEL_ROWS = {"int4": 256, "w4a8": 256, "int8": 64, "fp8": 16}
"""By ``--quantization``: maximum rows for the quantized kernel; larger products use a library."""
_IN_BYTES = ("int8", "w4a8", "fp8")

GAP_SECONDS = 3.5e-6
"""Overhead of an operation on the device beyond memory and arithmetic, measured with graphs on an H200."""

REPLAY_SECONDS = 150e-6
"""Host time of a step that replays a graph, without planning: packing and results (125 microseconds, measured on one
core without a GPU), and an estimate for two copies, their events and a launch."""

REPLAY_ROW_SECONDS = 0.4e-6
"""Additional host time per row, measured."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a backend computes a decode step. A layer with a recurrent mixer counts as one with attention.

    Numbers of operations: ``layer`` per layer, plus ``head_norm`` with QK norms, ``post_norm`` for each norm after a
    product, and ``integer`` with an integer KV cache; ``step`` in the model outside its layers, ``sampling`` from
    hidden states to token, ``packing`` for a step's inputs and results. ``kv_copies`` is how many times keys and values
    cross the memory bus, ``integer_copies`` the same for an integer cache (in its bytes). ``launch_seconds`` is the
    host's time per operation. ``recorded``: a CUDA graph launches all operations at once.

    A layer with experts has ``mixture`` operations more, ``each`` for each of a token's experts, and ``expert`` for
    each expert that some token has. One row needs ``unsorted`` operations fewer. With ``waits`` the host reads the
    counts of experts in each such layer, so the device is idle while it launches what follows.
    """

    name: str
    layer: int
    head_norm: int
    post_norm: int
    integer: int
    step: int
    sampling: int
    packing: int
    kv_copies: int
    integer_copies: int
    launch_seconds: float
    mixture: int
    each: int = 0
    expert: int = 0
    unsorted: int = 0
    waits: bool = False
    recorded: bool = False

    def operations(
        self, shape: ModelShape, integers: bool = False, quantization: str | None = None, rows: int = 1
    ) -> int:
        """Operations of a greedy decode step of ``rows`` sequences of similar length."""
        layer = self.layer + self.head_norm * shape.qk_norm + 2 * self.post_norm * shape.post_norms
        layer += self.integer * integers + few_bits(shape, quantization, rows)
        head = int(quantization is not None)  # its activations are rounded
        mixtures = (
            0
            if shape.sparse is None
            else shape.sparse.layers * self._mixture(shape.sparse, quantization, rows)
        )
        return shape.num_layers * layer + mixtures + self.step + self.sampling + head + self.packing

    def _mixture(self, sparse: SparseLayers, quantization: str | None, rows: int) -> int:
        """Additional operations of a layer with experts. Activations in bytes are rounded twice."""
        fewer, rounding = self.unsorted * (rows == 1), 2 * (quantization in _IN_BYTES)
        hit = distinct(sparse, rows)
        count: int = round(self.mixture - fewer + rounding + self.each * sparse.chosen + self.expert * hit)
        return count

    def idle_seconds(self, shape: ModelShape, rows: int) -> float:
        """Time in which the device waits for the host: that of the launches behind what the host reads."""
        if not self.waits or shape.sparse is None:
            return 0.0
        behind = self.expert * distinct(shape.sparse, rows)
        return shape.sparse.layers * behind * self.launch_seconds

    def host_seconds(self, operations: int, rows: int) -> float:
        """Host time of a step in seconds."""
        if self.recorded:
            return REPLAY_SECONDS + rows * REPLAY_ROW_SECONDS
        return operations * self.launch_seconds


def distinct(sparse: SparseLayers, rows: int) -> float:
    """The experts of a layer that ``rows`` tokens are expected to have, if all are equally likely."""
    share: float = (1 - sparse.chosen / sparse.experts) ** rows
    return sparse.experts * (1 - share)


def few_bits(shape: ModelShape, quantization: str | None, rows: int) -> int:
    """Additional operations per layer of the Triton kernels with quantized weights: rounding the attention output to 8
    bits, and for each product a reduction of partial sums, scaling, or dequantization of the weight.
    """
    if quantization is None:
        return 0
    rounding = int(quantization in _IN_BYTES)
    if rows > KERNEL_ROWS[quantization]:
        return rounding + (0 if quantization == "fp8" else 4 if shape.sparse is None else 2)
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    mlp: tuple[int, ...] = (
        () if shape.sparse is not None else (2 * shape.intermediate_size, shape.hidden_size)
    )
    outputs = (heads, shape.hidden_size, *mlp)
    tiles = -(-rows // _TILE_ROWS)
    return rounding + sum(2 * _PROCESSORS // (-(-each // _COLUMNS) * tiles) > 1 for each in outputs)


TORCH = Kernels(
    "torch",
    layer=37,
    head_norm=8,
    post_norm=8,
    integer=40,
    step=16,
    sampling=17,
    packing=12,
    kv_copies=3,  # gathered (read and written), then read
    integer_copies=15,  # also multiplied by their scales in float32, and converted
    launch_seconds=5e-6,
    mixture=18,
    each=3,
    expert=5,
    waits=True,
)
TRITON = Kernels(
    "triton",
    layer=9,
    head_norm=0,
    post_norm=1,
    integer=0,
    step=1,
    sampling=2,
    packing=12,
    kv_copies=1,
    integer_copies=1,
    mixture=2,  # logits, choice, sort, two products and a sum with the norm, for two products, activation and norm
    unsorted=1,
    launch_seconds=50e-6,  # measured: prompts of 2,048 tokens of Qwen3-0.6B, with Triton 3.6
)
GRAPHS = replace(TRITON, name="triton, graphs", packing=8, recorded=True)
BACKENDS = (TORCH, TRITON, GRAPHS)


@dataclass(frozen=True, slots=True)
class Expected:
    """A decode step of ``rows`` sequences. Times are in seconds; ``limit`` is the time at the device's peaks.

    The host makes ``launches`` launches, and the device executes ``operations`` kernels.
    """

    kernels: str
    rows: int
    context: int
    launches: int
    operations: int
    bytes: float
    limit: float
    host: float
    device: float

    @property
    def seconds(self) -> float:
        """The expected time of a step."""
        return max(self.host, self.device)

    @property
    def held_by(self) -> str:
        """Whether the host or the device takes longer."""
        return "host" if self.host > self.device else "device"


def expected(
    replica: Replica, kernels: Kernels, rows: int, context: int, quantization: str | None = None
) -> Expected:
    """A decode step of ``rows`` sequences with ``context`` tokens; ``quantization`` requires the Triton kernels."""
    load = decoding(rows, context)
    kv = load.read_tokens * replica.kv_bytes_per_token
    weights = replica.weight_bytes_read(load)
    least = weights + kv + replica.state_traffic(load)
    integers = replica.precision.kv_bytes < 2
    read = least + ((kernels.integer_copies if integers else kernels.kv_copies) - 1) * kv
    device, operations = replica.device, kernels.operations(replica.shape, integers, quantization, rows)
    arithmetic = replica.flops(load) / device.bf16_flops
    return Expected(
        kernels.name,
        rows,
        context,
        1 if kernels.recorded else operations,
        operations,
        read,
        max(least / device.bandwidth, arithmetic),
        kernels.host_seconds(operations, rows),
        max(weights / device.reached_bandwidth, arithmetic / device.efficiency_compute)
        + (read - weights) / device.reached_bandwidth
        + operations * GAP_SECONDS
        + kernels.idle_seconds(replica.shape, rows),
    )


def table(replica: Replica, steps: Sequence[Expected]) -> Table:
    """Steps as a table in milliseconds."""
    title = f"{replica.shape.name} on {replica.device.name}: decode steps from a static model; milliseconds"
    shown = Table(title=title, title_justify="left", header_style="bold")
    columns = (
        "batch",
        "context",
        "launches",
        "operations",
        "GB",
        "limit",
        "host",
        "device",
        "expected",
        "share",
    )
    shown.add_column("kernels")
    for column in columns:
        shown.add_column(column, justify="right")
    shown.add_column("held by")
    for step in steps:
        times = (f"{1000 * each:.2f}" for each in (step.limit, step.host, step.device, step.seconds))
        share = f"{step.limit / step.seconds:.0%}"
        numbers = (step.rows, step.context, step.launches, step.operations)
        counts = (*(f"{each:,}" for each in numbers), f"{step.bytes / 1e9:.2f}")
        shown.add_row(step.kernels, *counts, *times, share, step.held_by)
    return shown
