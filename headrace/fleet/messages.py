"""What rank 0 sends to the other ranks: their configuration at the start, then messages as bytes.

```
 kind | count of arrays | length of each | values ...
```
The configuration of a rank is the model and its part of it, and the sizes of its memory. A message is a kind, then
arrays of 32-bit integers. A plan's message omits everything that only sampling needs. A row takes 24 bytes, plus 4
for each wanted position and new block, so the size of a message does not depend on the context.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from importlib.metadata import version
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.checkpoint import INDEX
from headrace.compute.model.gguf.file import GgufFile, is_gguf
from headrace.compute.model.sharding import Place
from headrace.core.plan import Entry, Move, Row, StepPlan, Tier
from headrace.core.request import SamplingParams

_HEADER_BYTES = 1 << 20
"""Bytes of a GGUF file that are compared between ranks."""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """The part of the model that a rank loads, and its settings. dtypes are names of torch dtypes.

    ``host`` and ``port`` are those of rank 0's store for rendezvous; other ranks reach this one at ``address``.
    ``local_rank`` is its number on its machine. ``identity`` is `identity` of rank 0. ``threads`` is the number of CPU
    threads of each rank. ``with_fingerprint``: each rank replies with the fingerprint of its weights.
    """

    place: Place
    local_rank: int
    host: str
    port: int
    address: str
    folder: str
    identity: str
    dtype: str
    device: str
    kernels: str
    cpu_isa: str | None
    quantization: str | None
    dummy_seed: int | None
    max_model_len: int
    threads: int
    with_fingerprint: bool

    def at(self, rank: int, host: str, port: int) -> ModelSetup:
        """The same for another rank of this machine, and the address of rank 0's store."""
        return replace(self, place=Place(rank, *self.place[1:]), local_rank=rank, host=host, port=port)

    def to_json(self) -> bytes:
        """As JSON, for a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> ModelSetup:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**(fields | {"place": Place(*fields["place"])}))


@dataclass(frozen=True, slots=True)
class MemorySetup:
    """The sizes of a rank's memory, which are the same on every rank, and the folder of the disk tier, if any."""

    num_blocks: int
    block_size: int
    kv_dtype: str
    host_blocks: int
    max_num_seqs: int
    disk_folder: str | None
    disk_blocks: int

    def to_json(self) -> bytes:
        """As JSON, for a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> MemorySetup:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


def versions() -> str:
    """The versions that must be equal on all ranks."""
    return f"Headrace {version('headrace')}, torch {torch.__version__}"


def identity(folder: Path) -> str:
    """A digest that must be equal on all ranks: of the versions, the config, and the list of weight files.

    The list is the index of the shards, or the name and size of each file. Of a GGUF model it is that of its files, and
    the beginning of the first one.
    """
    digest = hashlib.sha256(versions().encode())
    if is_gguf(folder):
        paths = GgufFile.open(folder).paths
        digest.update(" ".join(f"{path.name} {path.stat().st_size};" for path in paths).encode())
        with folder.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
        return digest.hexdigest()
    digest.update((folder / "config.json").read_bytes())
    index = folder / INDEX
    if index.is_file():
        digest.update(index.read_bytes())
    for each in sorted(folder.glob("*.safetensors")):
        digest.update(f"{each.name} {each.stat().st_size};".encode())
    return digest.hexdigest()


def disk_folder(folder: str, place: Place) -> Path:
    """The folder of a rank's part of the disk tier; it differs by rank and by parallel sizes."""
    path = Path(folder).expanduser()
    if place.size == 1:
        return path
    return path / f"tensor-{place.tensor_size}-pipeline-{place.pipeline_size}-rank-{place.rank}"


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by its name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

_TIERS = tuple(Tier)
_NO_PARAMS = SamplingParams()


class Kind(IntEnum):
    """The kind of a message.

    ``CHECK``, ``LOAD`` and ``ALLOCATE`` contain JSON instead of arrays, ``STEP`` a plan. ``TOKENS`` and ``LOGITS`` are
    followed by a collective transfer: sampled tokens for slots and positions, or states whose logits are needed.
    """

    LOAD = 1
    ALLOCATE = 2
    STEP = 3
    TOKENS = 4
    LOGITS = 5
    CHECK = 6


class Step(NamedTuple):
    """A plan on another rank, the tokens of each entry, and the packed positions whose states are wanted."""

    plan: StepPlan
    tokens: tuple[Ints, ...]
    wanted: Ints


def packed(kind: Kind, *arrays: Sequence[int] | Ints) -> bytes:
    """A message from its arrays."""
    words = [np.asarray(array, dtype=np.int32).reshape(-1) for array in arrays]
    head = np.array([kind, len(words), *map(len, words)], dtype=np.int32)
    return b"".join(word.tobytes() for word in (head, *words))


def unpacked(message: bytes) -> tuple[Kind, list[Words]]:
    """The kind of a message and its arrays."""
    words = np.frombuffer(message, dtype=np.int32)
    count = int(words[1])
    ends = list(accumulate(words[2 : 2 + count].tolist(), initial=2 + count))
    return Kind(int(words[0])), [words[begin:end] for begin, end in pairwise(ends)]


def step_message(plan: StepPlan, tokens: Sequence[Ints], wanted: Ints) -> bytes:
    """A plan as a message; ``tokens`` are those of each entry, as its slot has them."""
    sizes = [
        (each.slot, len(known), len(each.blocks)) for each, known in zip(plan.entries, tokens, strict=True)
    ]
    rows = [
        (row.slot, row.start, row.length, row.samples, len(row.new_blocks), len(row.drafts))
        for row in plan.rows
    ]
    moves = [
        (move.source, move.target, _TIERS.index(move.source_tier), _TIERS.index(move.target_tier))
        for move in plan.moves
    ]
    return packed(
        Kind.STEP,
        list(chain(*sizes)),
        np.concatenate(tokens) if tokens else (),
        list(chain.from_iterable(each.blocks for each in plan.entries)),
        list(chain(*moves)),
        list(chain(*rows)),
        list(chain.from_iterable(row.new_blocks for row in plan.rows)),
        list(chain.from_iterable(row.drafts for row in plan.rows)),
        wanted,
    )


def step_of(arrays: Sequence[Words]) -> Step:
    """The plan of a message. Its entries have no parameters; their tokens are separate."""
    sizes, tokens, entry_blocks, moves, rows, new_blocks, drafts, wanted = arrays
    entries, known = [], []
    token = block = 0
    for slot, count, blocks in sizes.reshape(-1, 3).tolist():
        own = tuple(entry_blocks[block : block + blocks].tolist())
        entries.append(Entry(slot, "", (), 0, _NO_PARAMS, 0, frozenset(), own))
        known.append(tokens[token : token + count].astype(np.int64))
        token, block = token + count, block + blocks
    moved = tuple(
        Move(source, target, _TIERS[source_tier], _TIERS[target_tier])
        for source, target, source_tier, target_tier in moves.reshape(-1, 4).tolist()
    )
    planned = tuple(_rows(rows.reshape(-1, 6).tolist(), new_blocks.tolist(), drafts.tolist()))
    plan = StepPlan(0, tuple(entries), moved, planned)
    return Step(plan, tuple(known), wanted.astype(np.int64))


def _rows(rows: list[list[int]], new_blocks: list[int], drafts: list[int]) -> Iterator[Row]:
    block = draft = 0
    for slot, start, length, samples, blocks, drafted in rows:
        own, guessed = new_blocks[block : block + blocks], drafts[draft : draft + drafted]
        yield Row(slot, start, length, tuple(own), bool(samples), tuple(guessed))
        block, draft = block + blocks, draft + drafted
