"""The memory plan of a device: weights, activations, and as many KV blocks as fit in the rest.

It is computed once at start-up and printed, so that the process does not run out of memory later. The bytes of a block
come from `kv.bytes_per_block`; the blocks of a sequence and the activation bytes of a step come from `core.capacity`.
So start-up, admission, preemption and the planner agree.

`largest_step_bytes` measures the memory of the largest step before the KV cache is sized, instead of estimating it.
The step has as many tokens and rows as the limits allow. Its rows read and write one block, so that it needs no KV
cache: the memory of a step does not depend on which blocks it reads.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from headrace.compute.batch import Batch
from headrace.compute.device import DeviceFacts
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.sampling.choice import TokenChoice
from headrace.config import CacheOptions, ConfigError
from headrace.core.capacity import NO_WINDOWS, WindowGroups, activation_bytes, most_blocks, state_cells

CPU_KV_BYTES = 4 << 30
CPU_KV_SHARE = 0.4
"""On a CPU the KV cache has `CPU_KV_BYTES`, or the size of one sequence of maximum length if that is more, but at most
this share of the available memory."""

HOST_SHARE = 0.8
"""Maximum share of the free memory for the host tier; on CUDA it is pinned and cannot be swapped out."""

STAGING_BLOCKS = 64
"""Minimum number of blocks of the host tier with a disk tier, whose transfers all pass through it."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model; widths in elements, ``itemsize`` in bytes per activation. ``state_bytes`` are those of the
    recurrent states of a sequence, ``layer_state_bytes`` those of one layer, which a step copies for rows with
    positions ahead of their state. With ``windows``, blocks are those of one group of layers; ``window_note`` says why
    a model with window layers has no groups.
    """

    weight_bytes: int
    block_bytes: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int
    state_bytes: int = 0
    layer_state_bytes: int = 0
    windows: WindowGroups = NO_WINDOWS
    window_note: str = ""


@dataclass(frozen=True, slots=True)
class DraftSize:
    """The sizes of a draft model in bytes; ``most_blocks`` hold all sequences that can run at once."""

    weight_bytes: int
    block_bytes: int
    activation_bytes: int
    most_blocks: int


class RankSize(NamedTuple):
    """Bytes of the weights and the KV cache of one rank of a model in parts."""

    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of a device is used; in bytes, except counts of blocks and tokens.

    ``process_bytes`` is the memory of interpreter and libraries, 0 if the model is on another device.
    ``activations_measured`` says whether ``activation_bytes`` was measured. ``graph_bytes`` are those of CUDA graphs,
    an estimate until they have been recorded; then ``graphs`` describes them. Of a model in parts it is the plan of
    rank 0, and ``other_ranks`` are the sizes of ranks 1, 2, …. ``state_bytes`` are those of the recurrent states of a
    sequence: there are ``state_slots`` for sequences that run, and ``state_cells`` for checkpoints. With ``windows``,
    blocks are those of one group of layers; ``window_note`` is that of the model.
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
    draft_weight_bytes: int = 0
    draft_block_bytes: int = 0
    draft_blocks: int = 0
    other_ranks: tuple[RankSize, ...] = ()
    graph_bytes: int = 0
    graphs: str = ""
    activations_measured: bool = False
    state_bytes: int = 0
    state_slots: int = 0
    state_cells: int = 0
    windows: WindowGroups = NO_WINDOWS
    window_note: str = ""

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position in all layers, before a window passes it."""
        return self.block_bytes // self.block_size * (1 + self.windows.groups)

    @property
    def checkpoints(self) -> int | None:
        """The number of checkpoints of recurrent states; None: the model has no such states."""
        return self.state_cells if self.state_bytes else None

    @property
    def states_bytes(self) -> int:
        """All recurrent states."""
        return (self.state_slots + self.state_cells) * self.state_bytes

    @property
    def total_bytes(self) -> int:
        """The memory of the process when all blocks are in use."""
        host = self.host_blocks * self.block_bytes
        draft = self.draft_weight_bytes + self.draft_kv_bytes
        steps = self.activation_bytes + self.graph_bytes + self.states_bytes
        return self.process_bytes + self.weight_bytes + steps + self.kv_bytes + host + draft

    @property
    def draft_kv_bytes(self) -> int:
        """The KV cache of the draft model."""
        return self.draft_blocks * self.draft_block_bytes

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit at once; with window groups, of sequences of maximum length."""
        if self.windows.groups:
            return int(self.concurrency * self.max_model_len)
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Sequences of ``max_model_len`` tokens that fit at once."""
        return self.num_blocks / most_blocks(self.max_model_len, self.block_size, self.windows)

    def describe(self) -> list[str]:
        """The plan as lines of text."""
        lower = [
            f"{name:<12} {shown_bytes(blocks * self.block_bytes)}: {blocks:,} blocks that were evicted"
            for name, blocks in (("host tier", self.host_blocks), ("disk tier", self.disk_blocks))
            if blocks
        ]
        draft = [
            f"draft model  {shown_bytes(self.draft_weight_bytes)} of weights, KV cache"
            f" {shown_bytes(self.draft_kv_bytes)}: {self.draft_blocks:,} blocks,"
            f" {shown_bytes(self.draft_block_bytes)} each"
        ]
        ranks = [
            f"{f'rank {rank}':<12} {shown_bytes(each.weight_bytes)} of weights,"
            f" KV cache {shown_bytes(each.kv_bytes)}"
            for rank, each in enumerate(self.other_ranks, 1)
        ]
        whole = [
            f"memory       {shown_bytes(self.total_bytes)} in all, {shown_bytes(self.process_bytes)} of it libraries"
        ]
        graphs = [f"CUDA graphs  {shown_bytes(self.graph_bytes)}: {self.graphs or 'estimate'}"]
        states = [
            f"states       {shown_bytes(self.states_bytes)}: {self.state_slots:,} sequences and {self.state_cells:,}"
            f" checkpoints, {shown_bytes(self.state_bytes)} each"
        ]
        given = f"{self.windows.groups + 1} groups of layers; all but one keep {self.windows.tokens:,} tokens"
        windows = [f"windows      {given if self.windows.groups else self.window_note}"]
        found = "measured" if self.activations_measured else "estimate"
        return [
            f"device       {self.device}",
            f"weights      {shown_bytes(self.weight_bytes)}",
            f"activations  {shown_bytes(self.activation_bytes)} ({found})",
            *(graphs if self.graph_bytes or self.graphs else ()),
            *(states if self.state_bytes else ()),
            f"KV cache     {shown_bytes(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens,"
            f" {shown_bytes(self.block_bytes)} each",
            *(windows if self.windows.groups or self.window_note else ()),
            f"KV tokens    {self.kv_tokens:,}",
            f"concurrency  {self.concurrency:.1f} sequences of --max-model-len {self.max_model_len:,}",
            *(draft if self.draft_blocks else ()),
            *lower,
            *ranks,
            *(whole if self.process_bytes else ()),
        ]


def check_room(facts: DeviceFacts, weight_bytes: int, position_bytes: int, max_model_len: int) -> None:
    """Reject a model that needs more than the free memory, before it is loaded.

    ``weight_bytes`` is the least size of its weights, ``position_bytes`` the size of the rotary tables per position.

    Raises:
        ConfigError: its weights do not fit, or the tables of ``max_model_len`` positions do not fit in addition to
            them.
    """
    free = facts.free_bytes
    if weight_bytes > free:
        raise ConfigError(
            f"the weights need at least {shown_bytes(weight_bytes)}, but {facts.name} has {shown_bytes(free)} free: use"
            " a smaller model, or fewer bits (--quantization, --dtype)"
        )
    tables = position_bytes * max_model_len
    if weight_bytes + tables > free:
        raise ConfigError(
            f"--max-model-len {max_model_len}: its rotary tables need {shown_bytes(tables)}, but"
            f" {facts.name} has {shown_bytes(free - weight_bytes)} free besides the weights; use a lower value"
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
    draft: DraftSize | None = None,
    step_bytes: int | None = None,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """Divide the free memory of the device, with weights already loaded, and size the lower tiers of the cache.

    ``host_free_bytes`` are free for the host tier (None: the device is the host), ``process_bytes`` were used before
    the weights were loaded. A ``draft`` model's KV cache is a part of the KV cache of the
    options. ``step_bytes`` are the measured activations (None: estimated), ``graph_bytes`` those of CUDA graphs. Raises
    ConfigError if the host tier, or a sequence of ``max_model_len``, does not fit; it names the longest that does.
    """
    host_blocks, disk_blocks = lower_tiers(model.block_bytes, options)
    host_bytes = host_blocks * model.block_bytes
    _check_host_tier(host_bytes, facts.free_bytes if host_free_bytes is None else host_free_bytes)
    activations = _activations(facts, model, draft, max_num_seqs, max_num_batched_tokens, step_bytes)
    reserved = activations + graph_bytes + model.state_bytes * max_num_seqs + _given_cells(model, options)
    most = facts.free_bytes - reserved - (host_bytes if host_free_bytes is None else 0)
    pair = model.block_bytes + (draft.block_bytes if draft else 0)
    needed = (blocks := most_blocks(max_model_len, options.block_size, model.windows)) * pair
    budget, flag = _kv_budget(facts, options, reserved, needed, most)
    cells, budget = _state_cells(model, options, max(0, budget), needed)
    num_blocks, draft_blocks = _divided(budget, model.block_bytes, draft)
    if num_blocks < blocks:
        fitting = _fitting(num_blocks, max_model_len, options.block_size, model.windows)
        asked = f"{shown_bytes(needed)} of KV cache{' (with the draft model)' if draft else ''}"
        free = f"{shown_bytes(budget)} are available ({shown_bytes(facts.free_bytes)} free, activations"
        raise _does_not_fit(max_model_len, f"{asked}, but {free} {shown_bytes(reserved)})", fitting, flag)
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
        draft_weight_bytes=draft.weight_bytes if draft else 0,
        draft_block_bytes=draft.block_bytes if draft else 0,
        draft_blocks=draft_blocks,
        graph_bytes=graph_bytes,
        activations_measured=step_bytes is not None,
        state_bytes=model.state_bytes,
        state_slots=max_num_seqs,
        state_cells=cells,
        windows=model.windows,
        window_note=model.window_note,
    )


def _fitting(num_blocks: int, max_model_len: int, block_size: int, windows: WindowGroups) -> int:
    """The most tokens of a sequence that fits in so many blocks."""
    lengths = range(block_size, max_model_len + block_size, block_size)
    fits = bisect_right(lengths, num_blocks, key=lambda length: most_blocks(length, block_size, windows))
    return fits * block_size


def _does_not_fit(max_model_len: int, asked: str, fitting: int, flag: str) -> ConfigError:
    cure = f"--max-model-len {fitting}" if fitting > 1 else "a smaller model or device with more memory"
    return ConfigError(
        f"a sequence of --max-model-len {max_model_len} needs {asked}: use {cure}, or a larger {flag}"
    )


def _given_cells(model: ModelSize, options: CacheOptions) -> int:
    """Bytes of the checkpoints of recurrent states, if an option says how many; in addition to the KV cache.

    Raises:
        ConfigError: the option has less than one takes.
    """
    given = options.state_cache_bytes
    if not model.state_bytes or not given or not options.enable_prefix_caching:
        return 0
    if given < model.state_bytes:
        least = f"one checkpoint takes {model.state_bytes}"
        raise ConfigError(f"--state-cache-bytes {given}: {least}; use at least as much, or 0")
    return given // model.state_bytes * model.state_bytes


def _state_cells(model: ModelSize, options: CacheOptions, budget: int, needed: int) -> tuple[int, int]:
    """Number of checkpoints of recurrent states, and the bytes that are left for the KV cache.

    Unless an option says how many, they get a share of the ``budget`` that leaves the ``needed`` bytes.
    """
    given = options.state_cache_bytes if options.enable_prefix_caching else 0
    cells = state_cells(budget, needed, model.state_bytes, given)
    return cells, budget - (cells * model.state_bytes if given is None else 0)


def _activations(
    facts: DeviceFacts,
    model: ModelSize,
    draft: DraftSize | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    measured: int | None,
) -> int:
    estimated = activation_bytes(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        itemsize=model.itemsize,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    estimated += max_num_seqs * model.layer_state_bytes
    activations = (estimated if measured is None else measured) + (draft.activation_bytes if draft else 0)
    if activations >= facts.free_bytes:
        raise ConfigError(
            f"--max-num-batched-tokens {max_num_batched_tokens}, --max-num-seqs {max_num_seqs}: activations may need"
            f" {shown_bytes(activations)}, but {shown_bytes(facts.free_bytes)} are free; reduce them or add more memory"
        )
    return activations


def _divided(budget: int, block_bytes: int, draft: DraftSize | None) -> tuple[int, int]:
    """Blocks of the target and of the draft model: one of each, until the draft model needs no more."""
    if draft is None:
        return budget // block_bytes, 0
    both = budget // (block_bytes + draft.block_bytes)
    if both <= draft.most_blocks:
        return both, both
    return (budget - draft.most_blocks * draft.block_bytes) // block_bytes, draft.most_blocks


def _check_host_tier(host_bytes: int, free_bytes: int) -> None:
    if host_bytes > free_bytes * HOST_SHARE:
        raise ConfigError(
            f"--kv-offload-bytes {host_bytes}: at most {HOST_SHARE:.0%} of the host's memory that is free, which is"
            f" {shown_bytes(free_bytes)}"
        )


def _kv_budget(
    facts: DeviceFacts, options: CacheOptions, reserved: int, needed: int, most: int
) -> tuple[int, str]:
    """Bytes of the KV cache, and the option that sets them; ``most`` is what is left besides the ``reserved`` bytes of
    activations and graphs.
    """
    if options.kv_cache_memory_bytes is not None:
        budget = options.kv_cache_memory_bytes
        if budget > most:
            raise ConfigError(
                f"--kv-cache-memory-bytes {budget}: {facts.name} has {shown_bytes(facts.free_bytes)} free, of which"
                f" activations may need {shown_bytes(reserved)}; at most {max(0, most)} are left"
            )
        return budget, "--kv-cache-memory-bytes"
    if facts.kind == "cuda":
        used = facts.memory_bytes - facts.free_bytes
        budget = int(facts.memory_bytes * options.gpu_memory_utilization) - used - reserved
        return budget, "--gpu-memory-utilization"
    return min(max(CPU_KV_BYTES, needed), int(most * CPU_KV_SHARE)), "--kv-cache-memory-bytes"


def lower_tiers(block_bytes: int, options: CacheOptions) -> tuple[int, int]:
    """Number of blocks of the host tier and of the disk tier.

    Raises:
        ConfigError: a tier is too small for a block, or prefix caching is disabled.
    """
    if not options.kv_offload_bytes and options.kv_offload_path is None:
        return 0, 0
    if not options.enable_prefix_caching:
        raise ConfigError(
            "--kv-offload-bytes, --kv-offload-path: they need prefix caching, which is disabled"
        )
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
    """``count`` bytes in the most readable unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


class Meter(Protocol):
    """Measures the most memory that a device needs at once."""

    def begin(self) -> None:
        """Measure from now on."""
        ...

    def end(self) -> int:
        """The most bytes since `begin`, in addition to those in use then."""
        ...


class CudaMeter:
    """The memory that torch's allocator takes from a GPU, with what it loses to fragments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def end(self) -> int:
        torch.cuda.synchronize(self._device)
        most: int = torch.cuda.max_memory_reserved(self._device) - self._before
        torch.cuda.empty_cache()
        return most


@torch.inference_mode()
def largest_step_bytes(
    decoder: ModelDecoder,
    meter: Meter,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Run a step of ``max_num_batched_tokens`` tokens that samples ``max_num_seqs`` rows; its memory in bytes.

    Raises:
        torch.OutOfMemoryError: the device has less.
    """
    lengths = row_lengths(max_num_seqs, max_num_batched_tokens, max_model_len)
    kv = PagedKV(decoder.shape, 1, block_size, kv_dtype, decoder.device)
    batch = in_one_block(lengths, lengths, block_size, decoder.device)
    uniform = np.full(len(lengths), 0.5)
    ones, none = np.ones(len(lengths)), np.zeros(len(lengths))
    if decoder.states is not None:  # until the memory has been sized
        decoder.states.allocate(len(lengths), 0, decoder.device)
    try:
        meter.begin()
        hidden = decoder.hidden(batch, kv)
        logits = decoder.logits(hidden)
        shaped = logits.to(torch.float32, copy=True)  # as penalties and constraints do
        decoder.likeliest(logits)
        decoder.choose(shaped, TokenChoice(ones, none, none.astype(np.int64), ones * 0.9, uniform))
    finally:
        most = meter.end()
    return most


def row_lengths(rows: int, tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths of at most ``rows`` rows of at most ``longest`` tokens: as many single tokens as leave room for all."""
    left, lengths = tokens, []
    for row in range(min(rows, tokens)):
        after = min(rows, tokens) - row - 1
        lengths.append(max(1, min(longest, left - after)))
        left -= lengths[-1]
    return tuple(sorted(lengths))


def in_one_block(
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    block_size: int,
    device: torch.device,
    slot: int | None = None,
) -> Batch:
    """Rows of so many tokens behind contexts that end with them, all in block 0; those of one token come first. All
    have the same ``slot``, or slots of their own.
    """
    ends = np.cumsum(lengths)
    positions = np.concatenate(
        [np.arange(end - row, end) for row, end in zip(lengths, contexts, strict=True)]
    )
    blocks = -(-max(contexts) // block_size)
    return Batch(
        tokens=torch.zeros(len(positions), dtype=torch.int32, device=device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(positions % block_size).to(device),
        query_starts=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.zeros(len(lengths), blocks, dtype=torch.int32, device=device),
        logits_indices=torch.from_numpy(ends - 1).to(device),
        lengths=lengths,
        contexts=contexts,
        decode_rows=sum(length == 1 for length in lengths),
        block_size=block_size,
        slots=np.arange(len(lengths)) if slot is None else np.full(len(lengths), slot),
    )
