"""The memory of a loaded model: sizes and allocates the KV cache, the tiers below it, the runner and its graphs."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.compute.adapters.store import AdapterStore, SlotAdapters
from headrace.compute.blockfile import (
    BLOCKS_FILE,
    BlockFile,
    NotUsable,
    SavedState,
    read_snapshot,
    read_states,
    write_snapshot,
    write_states,
)
from headrace.compute.device import FreedMemory, device_facts
from headrace.compute.drafting.head import HeadDrafts
from headrace.compute.drafting.loading import LoadedDraft, LoadedHead, StepSizes
from headrace.compute.grammar.matchers import Matchers
from headrace.compute.graphs.steps import Graphs, describe_graphs, plan_graphs
from headrace.compute.memory_clearing import MemoryClearing
from headrace.compute.memory_plan import CudaMeter, MemoryPlan, RankSize, largest_step_bytes, plan_memory
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.shape import LEAST_GAIN, LayerGroups, gain, layer_groups
from headrace.compute.model.sharding import Place
from headrace.compute.mover import Mover
from headrace.compute.runner import LocalRunner
from headrace.compute.states import StateTensors
from headrace.config import CacheOptions, ConfigError, Options, SchedulerOptions
from headrace.core.capacity import blocks_needed, max_logit_rows
from headrace.core.engine import Engine
from headrace.core.knobs import Knobs
from headrace.core.ports import RunnerLost
from headrace.files import private_folder
from headrace.fleet.kv_transfer.link import Importer
from headrace.fleet.leader import Leader
from headrace.fleet.messages import MemorySetup, disk_folder, dtype_name
from headrace.service.takeover import when_free
from headrace.wiring.drafting import ModelDrafts, reads_states, speculation
from headrace.wiring.engine import TierSizes
from headrace.wiring.loading.adapters import adapter_bytes, open_adapters
from headrace.wiring.loading.computing import Computing
from headrace.wiring.loading.kv_transfer import OpenTransfer, open_transfer

# Builds the KV tiers below the device from their options: host memory, and a file on disk with its earlier contents.

SNAPSHOT_FILE = "snapshot.kv"
STATES_FILE = "states.kv"


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The lower tiers in use. A later process reads this one's blocks on disk only if it has the same ``identity``."""

    mover: Mover
    sizes: TierSizes
    disk: BlockFile | None
    identity: Mapping[str, Any]
    block_size: int
    notes: tuple[str, ...]
    states: StateTensors | None = None

    @property
    def snapshot(self) -> Path | None:
        return self.disk.path.with_name(SNAPSHOT_FILE) if self.disk else None

    def recall(self, engine: Engine) -> str:
        """Pass the disk contents of the last process to a new engine; returns a note for the terminal.

        The snapshot is deleted, because slots are overwritten from now on; the next orderly shutdown writes a new one.
        """
        if self.disk is None or self.snapshot is None or not self.snapshot.exists():
            return ""
        try:
            found = read_snapshot(self.snapshot, self.identity, self.block_size, self.disk.num_slots)
            self.snapshot.unlink()
        except NotUsable as error:
            return f"the cache in {self.snapshot} is not used: {error}"
        except OSError as error:
            return f"the cache in {self.snapshot} is not used: {error.strerror}"
        for saved, checksum in found:
            self.disk.checksums[saved.block] = checksum
        engine.adopt_cache([saved for saved, _ in found])
        states = "" if self.states is None else self._recall_states(engine, self.states, self.snapshot)
        return f"{len(found)} blocks of the last run are on disk{states}"

    def _recall_states(self, engine: Engine, states: StateTensors, snapshot: Path) -> str:
        """Pass the checkpoints of the last process, whose blocks are on disk, to a new engine."""
        path, pool = snapshot.with_name(STATES_FILE), engine.scheduler.pool
        if not path.exists():
            return ""
        count = 0
        try:
            for key, blocks, state in read_states(path, self._states_identity(states), states.row_bytes):
                cell = pool.adopt_checkpoint(key, blocks)
                if cell is not None:
                    states.write(cell, state, blocks * self.block_size)
                    count += 1
            path.unlink()
        except NotUsable as error:
            return f"; the states in {path} are not used: {error}"
        except OSError as error:
            return f"; the states in {path} are not used: {error.strerror}"
        return f", with {count} checkpoints of states"

    def _states_identity(self, states: StateTensors) -> dict[str, Any]:
        return {**self.identity, "state_bytes": states.row_bytes, "state_layout": states.layout}

    def save(self, engine: Engine) -> str:
        """Save the prefix cache to disk for the next process; returns a note for the terminal."""
        if self.disk is None or self.snapshot is None:
            return ""
        try:
            saved = engine.save_cache(time.monotonic())
            self.disk.flush()
            count = write_snapshot(self.snapshot, self.identity, saved, self.disk.checksums)
            states = "" if self.states is None else self._save_states(engine, self.states, self.snapshot)
        except OSError as error:
            return f"the cache could not be saved in {self.snapshot}: {error.strerror}"
        except RunnerLost as error:
            return f"the cache could not be saved in {self.snapshot}: {error}"
        return f"{count} blocks{states} are saved on disk for the next run"

    def _save_states(self, engine: Engine, states: StateTensors, snapshot: Path) -> str:
        """Save the checkpoints whose blocks some tier has; those that the disk has not are not adopted."""
        cells = engine.scheduler.pool.saved_checkpoints()
        found = (SavedState(key, blocks, states.read(cell)) for key, blocks, cell in cells)
        count = write_states(snapshot.with_name(STATES_FILE), self._states_identity(states), found)
        return f" and {count} checkpoints of states"


def block_identity(kv: PagedKV, block_bytes: int, fingerprint: str, layout: str) -> Mapping[str, Any]:
    """The properties that must be equal in two processes for their blocks to be compatible.

    ``layout`` describes how the kernels lay out a block.
    """
    return {
        "fingerprint": fingerprint,
        "dtype": str(kv.dtype).removeprefix("torch."),
        "block_size": kv.block_size,
        "block_bytes": block_bytes,
        "layout": layout,
    }


def open_tiers(
    ledger: MemoryPlan,
    folder: str | None,
    kv: PagedKV,
    identity: Mapping[str, Any],
    peers: Importer | None,
    place: Place,
    wait_seconds: float = 0.0,
) -> tuple[OpenTiers | None, MemoryPlan]:
    """The lower tiers that the memory plan has room for, and the plan with the disk size that is available.

    If another process uses ``folder``, wait up to ``wait_seconds`` for its end. Each of several ranks has a subfolder.
    """
    if not ledger.host_blocks:
        return None, ledger
    disk, notes = None, []
    if folder is not None:
        try:
            path = disk_folder(folder, place)
            private_folder(path)
            room = shutil.disk_usage(path).free // ledger.block_bytes
            if (path / BLOCKS_FILE).exists():
                room += (path / BLOCKS_FILE).stat().st_blocks * 512 // ledger.block_bytes
            if room < ledger.disk_blocks:
                notes.append(f"{path} has room for only {room:,} blocks")
            ledger = replace(ledger, disk_blocks=min(room, ledger.disk_blocks))
            take = partial(BlockFile, path / BLOCKS_FILE, ledger.disk_blocks, ledger.block_bytes)
            disk = when_free(take, wait_seconds, folder)
        except OSError as error:
            notes.append(f"no disk tier in {folder}: {error.strerror or error}")
            disk, ledger = None, replace(ledger, disk_blocks=0)
    mover = Mover(kv, ledger.host_blocks, disk, peers, ranks=place.size)
    sizes = TierSizes(
        ledger.host_blocks,
        ledger.disk_blocks,
        ledger.block_bytes,
        mover.host_speed(),
        disk.speed.read if disk else 0.0,
    )
    return OpenTiers(mover, sizes, disk, identity, kv.block_size, tuple(notes)), ledger


logger = logging.getLogger(__name__)


class Memory(NamedTuple):
    """The memory plan, the tiers below the device, the runner, the draft model, KV transfer with other servers, and
    LoRA adapters.
    """

    ledger: MemoryPlan
    tiers: OpenTiers | None
    runner: LocalRunner
    drafts: ModelDrafts | None
    transfer: OpenTransfer | None
    adapters: AdapterStore | None


def open_memory(
    computing: Computing,
    draft: LoadedDraft | LoadedHead | None,
    options: Options,
    knobs: Knobs,
    overlap: int,
    matchers: Matchers,
) -> Memory:
    """Size and allocate the KV cache, open the lower tiers, create the runner over them, and record its graphs."""
    cache, plans, place = options.cache, options.scheduler, computing.place
    graphs = _graphs(options, computing, knobs.batched_tokens)
    shape, device, max_model_len = computing.shape, computing.device, computing.max_model_len
    sizes = StepSizes(cache.block_size, plans.max_num_seqs, knobs.batched_tokens)
    groups = _layer_groups(computing, options, knobs.batched_tokens)
    step_bytes = _step_bytes(computing, cache, plans, knobs) if device.type == "cuda" else None
    ledger = plan_memory(
        computing.free_facts(),
        computing.size(cache.block_size, adapter_bytes(options, computing), groups),
        cache,
        max_model_len=max_model_len,
        max_num_seqs=plans.max_num_seqs,
        max_num_batched_tokens=knobs.batched_tokens,
        host_free_bytes=device_facts(torch.device("cpu")).free_bytes if device.type == "cuda" else None,
        process_bytes=computing.process_bytes,
        draft=draft.size(sizes) if draft else None,
        step_bytes=step_bytes,
        graph_bytes=graphs.bytes,
    )
    kv = _paged(computing, ledger, groups)
    identity = block_identity(kv, ledger.block_bytes, computing.fingerprint, computing.kernels.layout)
    transfer = open_transfer(cache, identity, kv)
    peers, wait = transfer.importer if transfer else None, options.server.takeover_timeout
    tiers, ledger = open_tiers(ledger, cache.kv_offload_path, kv, identity, peers, place, wait)
    if computing.leader is not None:
        ledger = replace(ledger, other_ranks=_share_memory(computing.leader, tiers, ledger, kv, options))
    tiers, states = _states(computing, ledger, tiers)
    adapters = open_adapters(options, computing)
    proposer = draft.proposer(ledger.draft_blocks, sizes, logger.warning) if draft else None
    runner = LocalRunner(
        computing.decoder,
        kv,
        vocab_size=shape.vocab_size,
        max_num_seqs=plans.max_num_seqs,
        max_model_len=max_model_len,
        device=device,
        background=overlap > 0 and device.type == "cpu" and knobs.turns == 1,
        breakable=overlap == 0 and computing.leader is None,
        mover=tiers.mover if tiers else None,
        ahead=_clearing(kv, plans.max_num_seqs * blocks_needed(max_model_len, cache.block_size)),
        matchers=matchers,
        head=proposer if isinstance(proposer, HeadDrafts) else None,
        graphs=graphs.spec,
        followers=computing.leader,
        pipelined=knobs.turns > 1,
        states=states,
        adapters=SlotAdapters(adapters, plans.max_num_seqs) if adapters else None,
        freed=FreedMemory(ledger.total_bytes) if device.type == "cpu" else None,
    )
    drafts = ModelDrafts(proposer, draft.nbytes / computing.decoder.nbytes) if draft and proposer else None
    return Memory(_with_graphs(ledger, runner), tiers, runner, drafts, transfer, adapters)


def _layer_groups(computing: Computing, options: Options, chunk: int) -> LayerGroups | str:
    """The groups of window layers, or why there are none; empty if the model has no such layers."""
    shape, cache = computing.shape, options.cache
    if all(layer.window is None for layer in shape.layers):
        return ""
    problems = {
        "the option is off": not cache.enable_window_groups,
        "they are computed on a CPU only": computing.device.type != "cpu",
        "transformers' implementation has no groups": not isinstance(computing.decoder, Decoder),
        "the model is in parts": computing.place.size > 1,
        "KV blocks have a tier in host memory or on disk": bool(
            cache.kv_offload_bytes or cache.kv_offload_path is not None
        ),
        "KV blocks are exchanged with other servers": cache.kv_transfer_config is not None,
        "a head drafts": reads_states(options.scheduler),
    }
    why = next((name for name, applies in problems.items() if applies), "")
    groups = why or layer_groups(shape, chunk)
    if (
        not isinstance(groups, str)
        and gain(groups, shape, computing.max_model_len, cache.block_size) < LEAST_GAIN
    ):
        groups = "groups would save little at this --max-model-len"
    return f"all tokens are kept in window layers: {groups}" if isinstance(groups, str) else groups


def _paged(computing: Computing, ledger: MemoryPlan, groups: LayerGroups | str) -> PagedKV:
    sizes = ledger.num_blocks, ledger.block_size, computing.kv_dtype, computing.device
    return PagedKV(computing.decoder.shape, *sizes, None if isinstance(groups, str) else groups)


def _with_graphs(ledger: MemoryPlan, runner: LocalRunner) -> MemoryPlan:
    """Record the graphs of a runner; the plan then has their bytes."""
    captured = runner.capture()
    if captured is None:
        return ledger
    return replace(ledger, graph_bytes=captured.bytes, graphs=describe_graphs(captured))


def _clearing(kv: PagedKV, live: int) -> MemoryClearing | None:
    """Clears memory ahead of its use, on a CPU, as far as ``live`` blocks."""
    return MemoryClearing(kv, far=live) if kv.device.type == "cpu" else None


def _states(
    computing: Computing, ledger: MemoryPlan, tiers: OpenTiers | None
) -> tuple[OpenTiers | None, StateTensors | None]:
    """Allocate the recurrent states of the model, if it has any; the tiers save them, too."""
    kept = computing.decoder.states
    if kept is None:
        return tiers, None
    states = kept.allocate(ledger.state_slots, ledger.state_cells, computing.device)
    return (replace(tiers, states=states) if tiers else None), states


def _share_memory(
    leader: Leader, tiers: OpenTiers | None, ledger: MemoryPlan, kv: PagedKV, options: Options
) -> tuple[RankSize, ...]:
    """Allocate memory of the same sizes on the other ranks, and subscribe to their copies to and from the disk."""
    if tiers is not None:
        leader.listen(tiers.mover.heard)
    sizes = ledger.num_blocks, ledger.block_size, dtype_name(kv.dtype), ledger.host_blocks
    disk = options.cache.kv_offload_path, ledger.disk_blocks
    return tuple(leader.allocate(MemorySetup(*sizes, options.scheduler.max_num_seqs, *disk)))


def _graphs(options: Options, computing: Computing, tokens: int) -> Graphs:
    """The graphs to record for steps of at most ``tokens`` tokens, unless the options forbid them. With a draft head or
    several ranks, there are no graphs.
    """
    if options.model.enforce_eager or reads_states(options.scheduler) or computing.leader is not None:
        return Graphs(None)
    config = speculation(options.scheduler)
    most_drafts = None if config is None else config.num_speculative_tokens
    return plan_graphs(computing.decoder, options.scheduler.max_num_seqs, most_drafts, tokens)


def _step_bytes(computing: Computing, cache: CacheOptions, plans: SchedulerOptions, knobs: Knobs) -> int:
    """The memory of the largest step on a GPU.

    Raises:
        ConfigError: the device has less free memory.
    """
    try:
        return largest_step_bytes(
            computing.decoder,
            CudaMeter(computing.device),
            block_size=cache.block_size,
            kv_dtype=computing.kv_dtype,
            max_model_len=computing.max_model_len,
            max_num_seqs=max_logit_rows(plans.max_num_seqs),
            max_num_batched_tokens=knobs.batched_tokens,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--max-num-batched-tokens {knobs.batched_tokens}, --max-num-seqs {plans.max_num_seqs}: the largest step"
            f" needs more memory than {computing.facts.name} has free: reduce them"
        ) from error
