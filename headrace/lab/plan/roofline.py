"""Roofline model of a replica: memory capacity, and the minimum time of a step.

A step takes as long as its arithmetic or its memory reads, whichever is longer, plus a fixed overhead:

```
 operations  2 x weights x tokens  +  2 x LM head x sampling rows  +  4 x layers x heads x head size x contexts
 bytes       weights once          +  keys and values of every row's context  +  recurrent states, read and written
 seconds     max(operations / reached rate, bytes / reached bandwidth) + overhead
```
On several devices (tensor parallelism) memory, arithmetic and bandwidth are multiplied, the latter two reduced by
`PARALLEL_SHARE`. With whole experts on each device (expert parallelism), a step waits for the device whose experts have
the most to read or to compute. Queues and arrivals are not modelled here: `capacity` computes the sustainable request
rate, and `search` confirms it with the simulator.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from headrace.core.capacity import (
    SparseLayers,
    WindowGroups,
    activation_bytes,
    blocks_needed,
    most_blocks,
    state_cells,
)

MEMORY_SHARE = 0.9
"""Share of a device's memory that an engine uses: the default of ``--gpu-memory-utilization``."""

PARALLEL_SHARE = 0.85
"""Relative speed of each device under tensor parallelism; two all-reduces per layer cost the rest. An estimate for
NVLink-class links."""

ACTIVATION_BYTES = 2

STATE_ITEMSIZE = 4
"""Recurrent states are float32."""

_STATE_FLOPS = 6


class Precision(NamedTuple):
    """Bytes per weight of the layers' matrices, per element of keys and values, and per weight that is never quantized
    (embedding, norms). ``int8``, ``int8_head``: the matrices, or the LM head, are multiplied as 8-bit integers.
    ``expert_bytes`` per weight of experts (None: as the other matrices)."""

    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    plain_bytes: float = 2.0
    int8: bool = False
    int8_head: bool = False
    expert_bytes: float | None = None

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the LM head."""
        return 1.0 if self.int8_head else self.plain_bytes


BFLOAT16 = Precision()

WEIGHTS: dict[str, Precision] = {
    "bfloat16": BFLOAT16,
    "int8": Precision(weight_bytes=1.0, int8=True, int8_head=True),  # weights and activations
    "int4": Precision(weight_bytes=0.5 + 5 / 128, int8_head=True),  # a float32 scale and a zero per 128
    "mxfp4": Precision(
        expert_bytes=0.5 + 4 / 32
    ),  # experts as gpt-oss stores them, with a float32 scale per 32
}
"""By the names of ``--quantization``, which stores the LM head in 8 bits; and of a stored format."""
KV_BYTES: dict[str, float] = {
    "bfloat16": 2.0,
    "int8": 1.0 + 4 / 128,  # a float32 scale per token and head of 128
}


class Load(NamedTuple):
    """The work of one step: ``decodes`` decode rows with one token each, and ``prefill_tokens`` of prompts.

    ``contexts`` is the sum over all tokens of the context that each attends to; ``read_tokens`` are the positions
    whose keys and values are read (once per row); ``samples`` are the rows that need the LM head. ``sequences`` are the
    rows whose recurrent states are read and written, where a model has some.
    """

    decodes: int
    prefill_tokens: int
    contexts: float
    read_tokens: float
    samples: int
    sequences: float = 0.0


def decoding(rows: int, context: float) -> Load:
    """A decode step of ``rows`` sequences with a mean ``context``."""
    return Load(rows, 0, rows * context, rows * context, rows, rows)


def chunk(start: int, length: int, *, last: bool) -> Load:
    """Positions ``[start, start + length)`` of one prompt, alone in a step."""
    return Load(0, length, length * (start + length / 2), start + length, int(last), 1)


class Room(NamedTuple):
    """What the memory for the KV cache holds: blocks, and checkpoints of recurrent states."""

    num_blocks: int
    state_cells: int


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine: a model on ``degree`` devices of a kind. Bytes are of all its devices together.

    ``degree`` must divide the model's heads of keys and values. ``expert_parallel``: each device has whole experts, and
    not a part of each; it must divide their number, and each is taken to be equally likely.
    """

    shape: ModelShape
    device: DeviceSpec
    degree: int = 1
    precision: Precision = BFLOAT16
    expert_parallel: bool = False

    # -- memory ------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        shape, precision = self.shape, self.precision
        matrices = self._matrix_bytes(shape.linear_parameters, shape.expert_parameters)
        plain = shape.num_parameters - shape.linear_parameters
        if precision.int8_head:  # in the place of a head of its own, or beside the embedding
            plain -= 0 if shape.tied_embeddings else shape.table_parameters
            matrices += shape.table_parameters * precision.head_bytes
        return round(matrices + plain * precision.plain_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.precision.kv_bytes)

    def workspace_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """Bytes of the activations of the largest step, over all devices."""
        return self.degree * activation_bytes(
            hidden_size=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            vocab_size=self.shape.vocab_size,
            itemsize=ACTIVATION_BYTES,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )

    def num_blocks(self, block_size: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """KV blocks that fit beside weights, workspace and states; 0 if these alone do not fit."""
        budget = self.kv_budget(max_num_batched_tokens, max_num_seqs, MEMORY_SHARE)
        return self.room(budget, block_size).num_blocks

    def kv_budget(self, max_num_batched_tokens: int, max_num_seqs: int, memory_share: float) -> int:
        """Bytes for KV blocks and checkpoints, beside weights, workspace and the states of running sequences."""
        usable = int(self.degree * self.device.memory_bytes * memory_share)
        states = max_num_seqs * self.shape.state_bytes
        workspace = self.workspace_bytes(max_num_batched_tokens, max_num_seqs)
        return max(0, usable - self.weight_bytes - workspace - states)

    def room(
        self, budget: int, block_size: int, needed: int = 0, state_cache_bytes: int | None = None
    ) -> Room:
        """What a ``budget`` in bytes holds; ``state_cache_bytes`` are beside it (None: checkpoints are a part of it,
        which leaves the ``needed`` bytes).
        """
        state_bytes = self.shape.state_bytes
        cells = state_cells(budget, needed, state_bytes, state_cache_bytes)
        blocks = budget - (cells * state_bytes if state_cache_bytes is None else 0)
        return Room(blocks // (block_size * self.kv_bytes_per_token), cells)

    def sequences_that_fit(self, context: int, num_blocks: int, block_size: int) -> int:
        """Sequences of ``context`` tokens that the blocks hold at once."""
        return num_blocks // blocks_needed(context, block_size)

    def windowed_sequences(self, context: int, budget: int, block_size: int, chunk: int) -> int:
        """Sequences of ``context`` tokens that a ``budget`` in bytes holds if window layers give blocks back.

        They do on CPUs. Rows compute at most ``chunk`` tokens. 0: there are no such layers.
        """
        windows = self.shape.windows
        if windows is None or self.device.name != "cpu":
            return 0
        groups = WindowGroups(windows.groups, windows.tokens, chunk)
        each = round(block_size * windows.block_elements * self.precision.kv_bytes)
        return budget // each // most_blocks(context, block_size, groups)

    # -- time --------------------------------------------------------------------------------------

    def step_seconds(self, load: Load) -> float:
        """Seconds of a step."""
        uneven = self._uneven(load)
        mixing = self._mixing_flops(load) / self._rate(self.device.bf16_flops)
        arithmetic = self._linear_seconds(load) + mixing
        arithmetic += 2 * uneven.products / self._matrix_rate(self.precision.int8)
        read = self.weight_bytes_read(load) + load.read_tokens * self.kv_bytes_per_token + uneven.bytes
        return (
            max(arithmetic, (read + self.state_traffic(load)) / self._bandwidth)
            + self.device.step_overhead_seconds
        )

    def weight_bytes_read(self, load: Load) -> float:
        """Bytes of weights that a step reads: the matrices, and the LM head if a row samples."""
        head = self.shape.table_parameters * self.precision.head_bytes if load.samples else 0.0
        idle = self.shape.idle_parameters(load.decodes + load.prefill_tokens)
        experts = self.shape.expert_parameters
        return self._matrix_bytes(self.shape.linear_parameters - idle, experts - idle) + head

    def state_traffic(self, load: Load) -> float:
        """Bytes of recurrent states that a step reads and writes."""
        return 2 * self.shape.state_bytes * load.sequences

    def prefill_seconds(self, prompt: int, max_num_batched_tokens: int) -> float:
        """Seconds to prefill one prompt alone, in steps of at most ``max_num_batched_tokens`` tokens."""
        total, start = 0.0, 0
        while start < prompt:
            length = min(max_num_batched_tokens, prompt - start)
            total += self.step_seconds(chunk(start, length, last=start + length == prompt))
            start += length
        return total

    def flops(self, load: Load) -> float:
        """Operations that the model itself needs for a step: the numerator of MFU."""
        shape = self.shape
        tokens = load.decodes + load.prefill_tokens
        each = shape.linear_parameters - shape.idle_parameters(1)
        matrices = 2 * (each * tokens + shape.table_parameters * load.samples)
        return matrices + self._mixing_flops(load)

    def mfu(self, load: Load) -> float:
        """Model FLOPs utilization: the step's operations as a share of the devices' bf16 peak."""
        return self.flops(load) / (self.step_seconds(load) * self.degree * self.device.bf16_flops)

    @property
    def dollars_per_hour(self) -> float:
        return self.degree * self.device.dollars_per_hour

    # -- the parts ---------------------------------------------------------------------------------

    def _uneven(self, load: Load) -> _Uneven:
        """What the busiest device has of experts beyond its even share, times the number of devices."""
        sparse, degree = self.shape.sparse, self.degree
        if sparse is None or degree == 1 or not self.expert_parallel:
            return _EVEN
        tokens = load.decodes + load.prefill_tokens
        own, most = sparse.experts // degree, _largest_of(degree)
        used = 1 - (1 - sparse.chosen / sparse.experts) ** tokens
        experts = min(most * math.sqrt(own * used * (1 - used)), own * (1 - used))
        even = tokens * sparse.chosen / degree
        rows = min(most * math.sqrt(even * (1 - 1 / degree)), tokens * min(own, sparse.chosen) - even)
        each = sparse.layers * sparse.size * degree
        return _Uneven(self._matrix_bytes(experts * each, experts * each), rows * each)

    def _matrix_bytes(self, weights: float, of_experts: float) -> float:
        """Bytes of so many weights of matrices, some of which belong to experts."""
        each, expert = self.precision.weight_bytes, self.precision.expert_bytes
        return weights * each + of_experts * (0.0 if expert is None else expert - each)

    @property
    def _speed(self) -> float:
        return 1.0 if self.degree == 1 else self.degree * PARALLEL_SHARE

    @property
    def _bandwidth(self) -> float:
        return self.device.reached_bandwidth * self._speed

    def _rate(self, peak: float) -> float:
        return peak * self.device.efficiency_compute * self._speed

    def _linear_seconds(self, load: Load) -> float:
        tokens = load.decodes + load.prefill_tokens
        matrices = 2 * (self.shape.linear_parameters - self.shape.idle_parameters(1)) * tokens
        head = 2 * self.shape.table_parameters * load.samples
        arithmetic = matrices / self._matrix_rate(self.precision.int8)
        return arithmetic + head / self._matrix_rate(self.precision.int8_head)

    def _matrix_rate(self, int8: bool) -> float:
        return self._rate(self.device.int8_ops if int8 else self.device.bf16_flops)

    def _mixing_flops(self, load: Load) -> float:
        """Operations of attention, and of recurrent states: a token reads each element twice and changes it once."""
        states = _STATE_FLOPS * self.shape.state_bytes / STATE_ITEMSIZE
        return 4 * self.shape.attention_width * load.contexts + states * (load.decodes + load.prefill_tokens)


class _Uneven(NamedTuple):
    """Bytes and multiplications."""

    bytes: float
    products: float


_EVEN = _Uneven(0.0, 0.0)


@cache
def _largest_of(count: int) -> float:
    """The expected largest of ``count`` independent values of a standard normal distribution."""
    points, normal = 1000, NormalDist()
    return fmean(normal.inv_cdf(((point + 0.5) / points) ** (1 / count)) for point in range(points))


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator, or one small CPU server, for a roofline model.

    ``bf16_flops`` and ``int8_ops`` are peak operations per second of dense matrix products (a multiply-add counts as
    two). ``memory_bytes`` is the device's memory, ``bandwidth`` its peak in bytes per second, ``host_bandwidth`` the
    bytes per second to or from host memory, one way. ``efficiency_compute`` and ``efficiency_bandwidth`` are the shares
    of the peaks that an engine reaches. ``step_overhead_seconds`` is the time of a step beyond arithmetic and memory
    reads (launches, sampling, planning). ``dollars_per_hour`` is a list price. ``max_num_seqs`` is the engine's default
    on this device: about the number of sequences of 1,000 tokens that fit beside an 8-billion-parameter model.
    """

    name: str
    bf16_flops: float
    int8_ops: float
    memory_bytes: int
    bandwidth: float
    host_bandwidth: float
    efficiency_compute: float
    efficiency_bandwidth: float
    step_overhead_seconds: float
    dollars_per_hour: float
    max_num_seqs: int = 64

    @property
    def reached_bandwidth(self) -> float:
        """Memory bandwidth that an engine reaches, in bytes per second."""
        return self.bandwidth * self.efficiency_bandwidth


# Efficiencies of the GPUs. On an H200, matrix products alone reach 790 of 989 TFLOP/s and copies 4.3 of 4.8 TB/s
# (measured with torch): upper bounds of 0.80 and 0.90. Norms, rotary embeddings, attention and gaps between kernels
# reduce them. One stream of Llama-3.1-8B takes 6.44 ms per token on an H100 with vLLM 0.19 (its fp8 KV cache report,
# 2026). Reading 15.0 GB at 3.35 TB/s takes 4.48 ms; with 0.80 of the bandwidth and 0.8 ms per step it is 6.40 ms.

A100 = DeviceSpec(
    "A100-80G",
    bf16_flops=312e12,  # NVIDIA A100 80GB SXM data sheet
    int8_ops=624e12,  # the same
    memory_bytes=80 << 30,  # nvidia-smi: 81,920 MiB
    bandwidth=2.039e12,  # data sheet
    host_bandwidth=25e9,  # PCIe 4.0 x16: 31.5 GB/s less the protocol
    efficiency_compute=0.65,  # older and slower, so launches weigh less than on Hopper
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=512,
    dollars_per_hour=1.79,  # between the specialised clouds (1.10-1.50) and the large ones (1.50-3.00), May 2026
)

H100 = DeviceSpec(
    "H100-SXM",
    bf16_flops=989.4e12,  # NVIDIA H100 data sheet: 1,979 with sparsity
    int8_ops=1_979e12,  # 3,958 with sparsity
    memory_bytes=81_559 << 20,  # nvidia-smi
    bandwidth=3.35e12,  # data sheet
    host_bandwidth=50e9,  # PCIe 5.0 x16: 63 GB/s less the protocol
    efficiency_compute=0.60,
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=512,
    dollars_per_hour=2.99,  # median of 37 providers, May 2026
)

H200 = DeviceSpec(
    "H200",
    bf16_flops=989.4e12,  # NVIDIA H200 data sheet: the H100's arithmetic
    int8_ops=1_979e12,
    memory_bytes=143_771 << 20,  # nvidia-smi; sold as 141 GB
    bandwidth=4.8e12,  # data sheet
    host_bandwidth=50e9,  # PCIe 5.0 x16
    efficiency_compute=0.60,
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=1024,
    dollars_per_hour=3.99,  # specialised clouds 3.50-4.50, May 2026
)

B200 = DeviceSpec(
    "B200",
    bf16_flops=2_250e12,  # NVIDIA HGX B200 data sheet: 4,500 with sparsity, at 1,000 W
    int8_ops=4_500e12,
    memory_bytes=183_359 << 20,  # nvidia-smi
    bandwidth=8.0e12,  # data sheet: up to
    host_bandwidth=50e9,  # PCIe 5.0 x16, as servers have it
    efficiency_compute=0.55,  # not measured: kernels for Hopper reach less of Blackwell's units
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=1024,
    dollars_per_hour=5.49,  # specialised clouds, 2026
)

L40S = DeviceSpec(
    "L40S",
    bf16_flops=362.05e12,  # NVIDIA L40S data sheet: 733 with sparsity
    int8_ops=733e12,
    memory_bytes=46_068 << 20,  # nvidia-smi; sold as 48 GB
    bandwidth=864e9,
    host_bandwidth=25e9,  # PCIe 4.0 x16
    efficiency_compute=0.55,  # not measured: its clock falls under load (350 W)
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=256,
    dollars_per_hour=0.99,  # specialised clouds, 2026
)

L4 = DeviceSpec(
    "L4",
    bf16_flops=121e12,  # NVIDIA L4 data sheet: 242 with sparsity
    int8_ops=242.5e12,  # 485 with sparsity
    memory_bytes=23_034 << 20,  # nvidia-smi; sold as 24 GB
    bandwidth=300e9,
    host_bandwidth=25e9,  # PCIe 4.0 x16
    efficiency_compute=0.45,  # not measured: 72 W do not sustain the peak clock
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=64,
    dollars_per_hour=0.71,  # on demand in a large cloud, 2026
)

A10G = DeviceSpec(
    "A10G",
    bf16_flops=70e12,  # NVIDIA A10G data sheet: 140 with sparsity (the A10 has 125)
    int8_ops=140e12,
    memory_bytes=22_731 << 20,  # nvidia-smi; sold as 24 GB
    bandwidth=600e9,
    host_bandwidth=25e9,  # PCIe 4.0 x16
    efficiency_compute=0.60,  # not measured
    efficiency_bandwidth=0.80,
    step_overhead_seconds=0.8e-3,
    max_num_seqs=64,
    dollars_per_hour=1.01,  # on demand in a large cloud, 2026
)

MI300X = DeviceSpec(
    "MI300X",
    bf16_flops=1_307.4e12,  # AMD MI300X data sheet
    int8_ops=2_614.9e12,
    memory_bytes=192 << 30,  # data sheet: 192 GB of HBM3
    bandwidth=5.3e12,
    host_bandwidth=50e9,  # PCIe 5.0 x16
    efficiency_compute=0.45,  # matrix libraries reach about half of the peak; portable attention kernels less
    efficiency_bandwidth=0.70,  # copies reach about 0.8; vLLM's portable kernels take 1.3 times AMD's own (Feb 2026)
    step_overhead_seconds=1.0e-3,
    max_num_seqs=1024,
    dollars_per_hour=2.49,  # 1.71-3.00, 2026
)

CPU = DeviceSpec(
    "cpu",  # two cores of a server processor with AMX (Sapphire Rapids), measured with torch and oneDNN
    bf16_flops=1.5e12,  # bf16 tiles, two threads
    int8_ops=4.0e12,  # int8 tiles, two threads
    memory_bytes=24 << 30,
    bandwidth=29e9,  # reading, two threads: 28-31 GB/s
    host_bandwidth=14e9,  # its own memory: a copy reads and writes
    efficiency_compute=0.60,  # prefill of Qwen3-0.6B: 0.9-1.0 TFLOP/s
    efficiency_bandwidth=0.75,  # decoding one stream: 66-80 % (OpenVINO 2026.4)
    step_overhead_seconds=2.0e-3,
    dollars_per_hour=0.10,  # two virtual cores of a cloud's compute-optimised kind
)

COMMON = (A100, H100, H200, MI300X, CPU)
"""Devices that are compared if none is named."""

DEVICES: dict[str, DeviceSpec] = {device.name: device for device in (*COMMON, B200, L40S, L4, A10G)}
"""The built-in devices by name."""

BY_DRIVER_NAME: dict[str, DeviceSpec] = {
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H200": H200,
    "NVIDIA B200": B200,
    "NVIDIA L40S": L40S,
    "NVIDIA L4": L4,
    "NVIDIA A10G": A10G,
    "AMD Instinct MI300X": MI300X,
    "AMD Instinct MI300X OAM": MI300X,
    "AMD Instinct MI300X VF": MI300X,  # one whole device in a virtual machine
}
"""Devices by the whole name that their driver reports: a PCIe card, an NVL or a MIG slice has other figures."""


class UnknownDevice(ValueError):
    """A device that is neither in `DEVICES` nor described by a file; the message says what was expected."""


def device(name: str) -> DeviceSpec:
    """A built-in device by its name (case-insensitive), or that of a ``.json`` file with the fields of `DeviceSpec`.

    Raises:
        UnknownDevice: no device has this name, or the file does not describe one.
    """
    if name.endswith(".json"):
        return _read_device(Path(name))
    for spec in DEVICES.values():
        if spec.name.lower() == name.lower():
            return spec
    raise UnknownDevice(
        f"there is no device {name!r}; known devices are {', '.join(DEVICES)}, or name a .json file that describes one"
    )


_SHARES = ("efficiency_compute", "efficiency_bandwidth")
_FREE = ("step_overhead_seconds", "dollars_per_hour")


def _read_device(file: Path) -> DeviceSpec:
    """The device of a file, with every field checked."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownDevice(f"{file} cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise UnknownDevice(f"{file}: expected one object with the fields of a device")
    known = {field.name: field for field in fields(DeviceSpec)}
    missing = [name for name, field in known.items() if field.default is MISSING and name not in given]
    if wrong := sorted(given.keys() - known.keys()):
        raise UnknownDevice(f"{file}: unknown field {wrong[0]}; the fields are {', '.join(known)}")
    if missing:
        raise UnknownDevice(f"{file}: the field {missing[0]} is missing")
    for name, value in given.items():
        if problem := _problem(known[name], value):
            raise UnknownDevice(f"{file}: {name} {problem}")
    return DeviceSpec(**given)


def _problem(field: Field[Any], value: Any) -> str:
    """What is wrong with a value of a device's file; empty if nothing is."""
    if field.name == "name":
        return "" if isinstance(value, str) and value.strip() else "must be a text that is not empty"
    whole = field.type == "int"
    number = isinstance(value, int) or (not whole and isinstance(value, float) and math.isfinite(value))
    if not number or isinstance(value, bool):
        return f"must be a {'whole ' if whole else ''}number, not {value!r}"
    if value < 0 or (value == 0 and field.name not in _FREE):
        return f"must be above 0, not {value}"
    return f"is a share of the peak, at most 1, not {value}" if field.name in _SHARES and value > 1 else ""


class LayerSums(NamedTuple):
    """What all layers of a model together have, where layers differ: the weights of their matrices, features of a
    token's queries, elements of a token's keys and values, and the other weights of the model (tables, norms).
    """

    linear_parameters: int
    attention_width: int
    kv_elements: int
    other_parameters: int


class WindowLayers(NamedTuple):
    """Layers whose tokens attend to the last ``tokens`` positions, in ``groups`` groups. A token has ``block_elements``
    keys and values in the layers of any group, and of the layers without a window.
    """

    groups: int
    tokens: int
    block_elements: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder; widths in elements. ``post_norms``: Gemma's two additional norms in each layer.

    ``sums`` replace what would follow from heads and widths of layers that are alike. ``num_layers`` are all layers,
    with attention or a recurrent mixer; ``state_bytes`` are the recurrent states of a sequence.

    Of layers with experts (``sparse``), ``intermediate_size`` is the width of all experts of a token together; layers
    with an MLP beside them are taken to be as wide. ``other_parameters`` are those of a layer beside matrices, norms
    and biases of queries, keys and values.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    sparse: SparseLayers | None = None
    other_parameters: int = 0
    sums: LayerSums | None = None
    state_bytes: int = 0
    windows: WindowLayers | None = None
    stored: str = "bfloat16"

    @property
    def linear_parameters(self) -> int:
        """Number of weights in the layers' matrices, without embedding and LM head."""
        if self.sums is not None:
            return self.sums.linear_parameters
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * heads
        dense = self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
        if self.sparse is None:
            return dense
        layers, experts, chosen, size = self.sparse
        return dense + layers * ((experts - chosen) * size + experts * self.hidden_size)

    @property
    def expert_parameters(self) -> int:
        """Number of weights of all experts that some tokens have and others have not."""
        return self.sparse.layers * self.sparse.experts * self.sparse.size if self.sparse else 0

    def idle_parameters(self, tokens: float) -> float:
        """Number of weights of the experts that no token of a step is expected to have."""
        return self.sparse.unused(tokens) if self.sparse else 0.0

    @property
    def table_parameters(self) -> int:
        """Number of weights in the input embedding, and in the LM head (the same table if tied)."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_width(self) -> int:
        """Features of the queries of a token, over all layers."""
        if self.sums is not None:
            return self.sums.attention_width
        return self.num_layers * self.num_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        if self.sums is not None:
            return self.sums.linear_parameters + self.sums.other_parameters
        norms = (4 if self.post_norms else 2) * self.hidden_size + 2 * self.head_dim * self.qk_norm
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        tables = self.table_parameters * (1 if self.tied_embeddings else 2)
        each = norms + biases + self.other_parameters
        return self.linear_parameters + self.num_layers * each + self.hidden_size + tables

    def kv_bytes_per_token(self, element_bytes: float = 2.0) -> int:
        """Bytes of the KV cache per token, all layers; a sliding window is not taken into account."""
        uniform = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return round((uniform if self.sums is None else self.sums.kv_elements) * element_bytes)


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128_256, tied_embeddings=True),
        ModelShape("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128_256, tied_embeddings=True),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064, qkv_bias=True),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151_936, tied_embeddings=True, qk_norm=True),
        ModelShape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151_936, tied_embeddings=True, qk_norm=True),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936, qk_norm=True),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25_600, 151_936, qk_norm=True),
        ModelShape(
            "qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151_936,
            qk_norm=True, sparse=SparseLayers(48, 128, 8, 3 * 2048 * 768),
        ),
        ModelShape(
            "gpt-oss-20b", 24, 2880, 64, 8, 64, 4 * 2880, 201_088,
            qkv_bias=True, sparse=SparseLayers(24, 32, 4, 3 * 2880 * 2880), other_parameters=279_456,
            windows=WindowLayers(1, 128, 12 * 2 * 8 * 64), stored="mxfp4",
        ),
        ModelShape(
            "gpt-oss-120b", 36, 2880, 64, 8, 64, 4 * 2880, 201_088,
            qkv_bias=True, sparse=SparseLayers(36, 128, 4, 3 * 2880 * 2880), other_parameters=1_108_992,
            windows=WindowLayers(1, 128, 18 * 2 * 8 * 64), stored="mxfp4",
        ),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152, tied_embeddings=True),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14_336, 32_768),
        ModelShape("phi-3-mini", 32, 3072, 32, 32, 96, 8192, 32_064),
        ModelShape(
            "gemma-2-9b", 42, 3584, 16, 8, 256, 14_336, 256_000,
            tied_embeddings=True, post_norms=True, windows=WindowLayers(1, 4096, 21 * 2 * 8 * 256),
        ),
        ModelShape(
            "gemma-3-1b", 26, 1152, 4, 1, 256, 6912, 262_144,
            tied_embeddings=True, qk_norm=True, post_norms=True, windows=WindowLayers(6, 512, 4 * 2 * 256),
        ),
    )
}  # fmt: skip
"""Built-in models by name; planning with them needs no download."""
