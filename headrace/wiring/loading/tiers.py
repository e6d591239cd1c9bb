"""Builds the KV tiers below the device from their options: host memory, and a file on disk with its earlier contents.

If the disk fails, the server starts without the disk tier and reports it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.compute.blockfile import BLOCKS_FILE, BlockFile, NotUsable, read_snapshot, write_snapshot
from headrace.compute.memory_plan import MemoryPlan
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.sharding import Place
from headrace.compute.mover import Mover
from headrace.core.engine import Engine
from headrace.core.ports import RunnerLost
from headrace.files import private_folder
from headrace.fleet.kv_transfer.link import Importer
from headrace.fleet.setup import disk_folder
from headrace.service.takeover import when_free
from headrace.wiring.engine import TierSizes

SNAPSHOT_FILE = "snapshot.kv"


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The lower tiers in use. A later process reads this one's blocks on disk only if it has the same ``identity``."""

    mover: Mover
    sizes: TierSizes
    disk: BlockFile | None
    identity: Mapping[str, Any]
    block_size: int
    notes: tuple[str, ...]

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
        return f"{len(found)} blocks of the last run are on disk"

    def save(self, engine: Engine) -> str:
        """Save the prefix cache to disk for the next process; returns a note for the terminal."""
        if self.disk is None or self.snapshot is None:
            return ""
        try:
            saved = engine.save_cache(time.monotonic())
            self.disk.flush()
            count = write_snapshot(self.snapshot, self.identity, saved, self.disk.checksums)
        except OSError as error:
            return f"the cache could not be saved in {self.snapshot}: {error.strerror}"
        except RunnerLost as error:
            return f"the cache could not be saved in {self.snapshot}: {error}"
        return f"{count} blocks are saved on disk for the next run"


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
