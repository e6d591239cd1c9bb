"""The configuration of a rank: the model and its part of it, and the sizes of its memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from headrace.compute.checkpoint import INDEX
from headrace.compute.model.gguf.file import GgufFile, is_gguf
from headrace.compute.model.sharding import Place

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
