"""Where the memory goes: weights, activations, and as many KV blocks as the rest holds.

Sized once at start-up and printed, so that nothing is found out by running out. The bytes of a block come from
`kv.bytes_per_block`, the blocks of a sequence and the bytes of a step's activations from `core.capacity`: start-up,
admission, preemption and the planner cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.compute.device import DeviceFacts
from headrace.config import CacheOptions, ConfigError
from headrace.core.capacity import activation_bytes, blocks_needed

CPU_KV_BYTES = 4 << 30
CPU_KV_SHARE = 0.4
"""On a CPU the cache takes `CPU_KV_BYTES`, or what one longest sequence needs if that is more, but never more
than this share of what is available: others live there too."""

HOST_SHARE = 0.8
"""What the host tier may take of the memory that is free: on CUDA it is pinned, and cannot be swapped out."""

STAGING_BLOCKS = 64
"""Blocks of the host tier at least where there is a disk: all of it passes through there."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What sizing needs to know of a model; widths in elements, ``itemsize`` in bytes per activation."""

    weight_bytes: int
    block_bytes: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a device's memory is cut; all in bytes, but for the counts of blocks and tokens.

    ``process_bytes`` are those of interpreter and libraries, 0 where the model lies elsewhere.
    """

    device: str
    free_bytes: int
    weight_bytes: int
    activation_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int
    process_bytes: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0

    @property
    def total_bytes(self) -> int:
        """What the process will have taken when all blocks are in use."""
        host = self.host_blocks * self.block_bytes
        return self.process_bytes + self.weight_bytes + self.activation_bytes + self.kv_bytes + host

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit at once."""
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Sequences of ``max_model_len`` tokens that fit at once."""
        return self.num_blocks / blocks_needed(self.max_model_len, self.block_size)

    def describe(self) -> list[str]:
        """The ledger as lines of text."""
        lower = [
            f"{name:<12} {shown_bytes(blocks * self.block_bytes)}: {blocks:,} blocks that were evicted"
            for name, blocks in (("host tier", self.host_blocks), ("disk tier", self.disk_blocks))
            if blocks
        ]
        whole = [
            f"memory       {shown_bytes(self.total_bytes)} in all, {shown_bytes(self.process_bytes)} of it libraries"
        ]
        return [
            f"device       {self.device}",
            f"weights      {shown_bytes(self.weight_bytes)}",
            f"activations  {shown_bytes(self.activation_bytes)} (estimate)",
            f"KV cache     {shown_bytes(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens,"
            f" {shown_bytes(self.block_bytes)} each",
            f"KV tokens    {self.kv_tokens:,}",
            f"concurrency  {self.concurrency:.1f} sequences of --max-model-len {self.max_model_len:,}",
            *lower,
            *(whole if self.process_bytes else ()),
        ]


def check_room(facts: DeviceFacts, weight_bytes: int, position_bytes: int, max_model_len: int) -> None:
    """Refuse a model before it is loaded that takes more than is free.

    ``weight_bytes`` are those of its weights at least, ``position_bytes`` those of the rotary tables for a position.

    Raises:
        ConfigError: its weights do not fit, or the tables of ``max_model_len`` positions do not fit beside them.
    """
    free = facts.free_bytes
    if weight_bytes > free:
        raise ConfigError(
            f"the weights take {shown_bytes(weight_bytes)} or more, and {facts.name} has {shown_bytes(free)} free: use"
            " a smaller model, or fewer bits (--quantization, --dtype)"
        )
    tables = position_bytes * max_model_len
    if weight_bytes + tables > free:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the rotary tables of so many positions take {shown_bytes(tables)}, and"
            f" {facts.name} has {shown_bytes(free - weight_bytes)} free beside the weights; use less"
        )


def plan_memory(
    facts: DeviceFacts,
    model: ModelSize,
    options: CacheOptions,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    host_free_bytes: int | None = None,
    process_bytes: int = 0,
) -> MemoryPlan:
    """Cut the memory that is free on the device, weights already loaded, and the lower tiers of the cache.

    ``host_free_bytes`` is what the host tier may be cut from; None where the device is the host. ``process_bytes``
    is what the process took of the device before the weights came.

    Raises:
        ConfigError: a sequence of ``max_model_len`` would not fit; it names the longest that does. Or the host tier
            would not.
    """
    host_blocks, disk_blocks = lower_tiers(model.block_bytes, options)
    host_bytes = host_blocks * model.block_bytes
    if host_bytes > (facts.free_bytes if host_free_bytes is None else host_free_bytes) * HOST_SHARE:
        raise ConfigError(
            f"--kv-offload-bytes {host_bytes}: at most {HOST_SHARE:.0%} of the host's memory that is free, which is"
            f" {shown_bytes(facts.free_bytes if host_free_bytes is None else host_free_bytes)}"
        )
    activations = activation_bytes(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        itemsize=model.itemsize,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    if activations >= facts.free_bytes:
        raise ConfigError(
            f"--max-num-batched-tokens {max_num_batched_tokens}, --max-num-seqs {max_num_seqs}: the activations of such"
            f" a step may need {shown_bytes(activations)}, and {shown_bytes(facts.free_bytes)} are free; use less, or a"
            " device with more memory"
        )
    most = facts.free_bytes - activations - (host_bytes if host_free_bytes is None else 0)
    needed = blocks_needed(max_model_len, options.block_size) * model.block_bytes
    if options.kv_cache_memory_bytes is not None:
        budget, flag = options.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
        if budget > most:
            raise ConfigError(
                f"--kv-cache-memory-bytes {budget}: {facts.name} has {shown_bytes(facts.free_bytes)} free, of which"
                f" activations may need {shown_bytes(activations)}; at most {max(0, most)} are left"
            )
    elif facts.kind == "cuda":
        used = facts.memory_bytes - facts.free_bytes
        budget = int(facts.memory_bytes * options.gpu_memory_utilization) - used - activations
        flag = "--gpu-memory-utilization"
    else:
        budget, flag = min(max(CPU_KV_BYTES, needed), int(most * CPU_KV_SHARE)), "--kv-cache-memory-bytes"
    num_blocks = max(0, budget) // model.block_bytes
    fitting = num_blocks * options.block_size
    if fitting < max_model_len:
        cure = f"--max-model-len {fitting}" if fitting > 1 else "a smaller model or device with more memory"
        raise ConfigError(
            f"a sequence of --max-model-len {max_model_len} needs {shown_bytes(needed)} of KV cache, but"
            f" {shown_bytes(max(0, budget))} are there ({shown_bytes(facts.free_bytes)} free, activations"
            f" {shown_bytes(activations)}): use {cure}, or a larger {flag}"
        )
    return MemoryPlan(
        device=facts.name,
        free_bytes=facts.free_bytes,
        weight_bytes=model.weight_bytes,
        activation_bytes=activations,
        block_bytes=model.block_bytes,
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        process_bytes=process_bytes,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
    )


def lower_tiers(block_bytes: int, options: CacheOptions) -> tuple[int, int]:
    """Blocks of the host and of the disk tier.

    Raises:
        ConfigError: a tier too small for a block, or one without a cache to be the lower tier of.
    """
    if not options.kv_offload_bytes and options.kv_offload_path is None:
        return 0, 0
    if not options.enable_prefix_caching:
        raise ConfigError("--kv-offload-bytes, --kv-offload-path: nothing is kept without prefix caching")
    host_blocks = options.kv_offload_bytes // block_bytes
    if options.kv_offload_bytes and not host_blocks:
        raise ConfigError(f"--kv-offload-bytes {options.kv_offload_bytes}: one block takes {block_bytes}")
    if options.kv_offload_path is None:
        return host_blocks, 0
    disk_blocks = options.kv_offload_disk_bytes // block_bytes
    if not disk_blocks:
        raise ConfigError(
            f"--kv-offload-disk-bytes {options.kv_offload_disk_bytes}: one block takes {block_bytes}"
        )
    return max(host_blocks, STAGING_BLOCKS), disk_blocks


def shown_bytes(count: int) -> str:
    """``count`` bytes in the unit that reads best."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
