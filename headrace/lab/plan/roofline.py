"""Roofline model of a replica: memory capacity, and the minimum time of a step.

A step takes as long as its arithmetic or its memory reads, whichever is longer, plus a fixed overhead:

```
 operations  2 x weights x tokens  +  2 x LM head x sampling rows  +  4 x layers x heads x head size x contexts
 bytes       weights once          +  keys and values of every row's context
 seconds     max(operations / reached rate, bytes / reached bandwidth) + overhead
```
On several devices (tensor parallelism) memory, arithmetic and bandwidth are multiplied, the latter two reduced by
`PARALLEL_SHARE`. Queues and arrivals are not modelled here: `capacity` computes the sustainable request rate, and
`search` confirms it with the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.capacity import activation_bytes, blocks_needed
from headrace.lab.plan.devices import DeviceSpec
from headrace.lab.plan.shapes import ModelShape

MEMORY_SHARE = 0.9
"""Share of a device's memory that an engine uses: the default of ``--gpu-memory-utilization``."""

PARALLEL_SHARE = 0.85
"""Relative speed of each device under tensor parallelism; two all-reduces per layer cost the rest. An estimate for
NVLink-class links."""

ACTIVATION_BYTES = 2


class Precision(NamedTuple):
    """Bytes per weight of the layers' matrices, per element of keys and values, and per weight that is never quantized
    (embedding, norms). ``int8``, ``int8_head``: the matrices, or the LM head, are multiplied as 8-bit integers."""

    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    plain_bytes: float = 2.0
    int8: bool = False
    int8_head: bool = False

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the LM head."""
        return 1.0 if self.int8_head else self.plain_bytes


BFLOAT16 = Precision()

WEIGHTS: dict[str, Precision] = {
    "bfloat16": BFLOAT16,
    "int8": Precision(weight_bytes=1.0, int8=True, int8_head=True),  # weights and activations
    "int4": Precision(weight_bytes=0.5 + 5 / 128, int8_head=True),  # a float32 scale and a zero per 128
}
"""By the names of ``--quantization``; every quantization stores the LM head in 8 bits."""
KV_BYTES: dict[str, float] = {
    "bfloat16": 2.0,
    "int8": 1.0 + 4 / 128,  # a float32 scale per token and head of 128
}


class Load(NamedTuple):
    """The work of one step: ``decodes`` decode rows with one token each, and ``prefill_tokens`` of prompts.

    ``contexts`` is the sum over all tokens of the context that each attends to; ``read_tokens`` are the positions
    whose keys and values are read (once per row); ``samples`` are the rows that need the LM head.
    """

    decodes: int
    prefill_tokens: int
    contexts: float
    read_tokens: float
    samples: int


def decoding(rows: int, context: float) -> Load:
    """A decode step of ``rows`` sequences with a mean ``context``."""
    return Load(rows, 0, rows * context, rows * context, rows)


def chunk(start: int, length: int, *, last: bool) -> Load:
    """Positions ``[start, start + length)`` of one prompt, alone in a step."""
    return Load(0, length, length * (start + length / 2), start + length, int(last))


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine: a model on ``degree`` devices of a kind. Bytes are of all its devices together.

    ``degree`` must divide the model's heads of keys and values.
    """

    shape: ModelShape
    device: DeviceSpec
    degree: int = 1
    precision: Precision = BFLOAT16

    # -- memory ------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> int:
        shape, precision = self.shape, self.precision
        matrices = shape.linear_parameters * precision.weight_bytes
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

    def num_blocks(
        self,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        memory_share: float = MEMORY_SHARE,
    ) -> int:
        """KV blocks that fit beside weights and workspace; 0 if these alone do not fit."""
        usable = int(self.degree * self.device.memory_bytes * memory_share)
        left = usable - self.weight_bytes - self.workspace_bytes(max_num_batched_tokens, max_num_seqs)
        return max(0, left) // (block_size * self.kv_bytes_per_token)

    def sequences_that_fit(self, context: int, num_blocks: int, block_size: int) -> int:
        """Sequences of ``context`` tokens that the blocks hold at once."""
        return num_blocks // blocks_needed(context, block_size)

    # -- time --------------------------------------------------------------------------------------

    def step_seconds(self, load: Load) -> float:
        """Seconds of a step."""
        arithmetic = self._linear_seconds(load) + self._attention_flops(load) / self._rate(
            self.device.bf16_flops
        )
        read = self.weight_bytes_read(load) + load.read_tokens * self.kv_bytes_per_token
        return max(arithmetic, read / self._bandwidth) + self.device.step_overhead_seconds

    def weight_bytes_read(self, load: Load) -> float:
        """Bytes of weights that a step reads: the matrices, and the LM head if a row samples."""
        head = self.shape.table_parameters * self.precision.head_bytes if load.samples else 0.0
        return self.shape.linear_parameters * self.precision.weight_bytes + head

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
        matrices = 2 * (shape.linear_parameters * tokens + shape.table_parameters * load.samples)
        return matrices + self._attention_flops(load)

    def mfu(self, load: Load) -> float:
        """Model FLOPs utilization: the step's operations as a share of the devices' bf16 peak."""
        return self.flops(load) / (self.step_seconds(load) * self.degree * self.device.bf16_flops)

    @property
    def dollars_per_hour(self) -> float:
        return self.degree * self.device.dollars_per_hour

    # -- the parts ---------------------------------------------------------------------------------

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
        matrices = 2 * self.shape.linear_parameters * tokens
        head = 2 * self.shape.table_parameters * load.samples
        arithmetic = matrices / self._matrix_rate(self.precision.int8)
        return arithmetic + head / self._matrix_rate(self.precision.int8_head)

    def _matrix_rate(self, int8: bool) -> float:
        return self._rate(self.device.int8_ops if int8 else self.device.bf16_flops)

    def _attention_flops(self, load: Load) -> float:
        return 4 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim * load.contexts
