"""The files of a checkpoint: which tensors they contain, each read on demand, and where linear layers are in them.

Only safetensors are supported: the older ``.bin``/``.pt`` files are pickles, which can run code when opened. `layout`
has the names of the tensors, and `weights` assembles them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, NamedTuple, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.config.errors import shortened
from headrace.files import read_json_file

INDEX = "model.safetensors.index.json"


class ModelError(ValueError):
    """A model that cannot be served; the message names the unsupported part and the supported values."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class Checkpoint:
    """The tensors in a folder's safetensors; a context manager, within which they can be read.

    Args:
        folder: contains ``model.safetensors``, or shards and their index, or any ``*.safetensors``.
        plain_name: maps a tensor's name in the file to its name here.

    Raises:
        ModelError: there are no safetensors, or a file is broken.
    """

    def __init__(self, folder: Path, plain_name: Callable[[str], str] = str) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._places: dict[str, tuple[Path, Any, str]] = {}
        self._parts: dict[str, tuple[tuple[int | slice, ...], bool]] = {}
        files, index = _files(folder)
        try:
            for file in files:
                self._add(file, index, plain_name)
            self._check_index(index, plain_name)
        except ModelError:
            self._stack.close()
            raise

    def _add(self, file: Path, index: Mapping[str, str], plain_name: Callable[[str], str]) -> None:
        """Open a file and take its tensors, except those that the index places in another file."""
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
        for name in names:
            if self.folder / index.get(name, file.name) != file and name in index:
                continue
            plain = plain_name(name)
            if plain in self._places:
                other, _, stored = self._places[plain]
                if stored != name:
                    raise ModelError(f"{file} has {name}, and {other} has {stored}, which is the same tensor")
                raise ModelError(
                    f"{name} is in {other} and in {file.name}, and no index says which one counts"
                )
            self._places[plain] = file, opened, name

    def _check_index(self, index: Mapping[str, str], plain_name: Callable[[str], str]) -> None:
        absent = [name for name in index if plain_name(name) not in self._places]
        if absent:
            where = index[min(absent)]
            raise ModelError(f"{self.folder / where} lacks {listed(absent)}, named by {INDEX}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._places.clear()
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors, mapped by ``plain_name``."""
        return self._places.keys()

    def add_name(self, name: str, of: str) -> None:
        """Give a tensor a second name."""
        self._places[name] = self._places[of]

    def add_part(self, name: str, of: str, *index: int | slice, turned: bool = False) -> None:
        """Give a part of a tensor, ``of[index]``, or if ``turned`` its transpose, a name."""
        self._places[name] = self._places[of]
        self._parts[name] = index, turned

    def forget(self, name: str) -> None:
        """Remove the name of a tensor."""
        del self._places[name]

    def drop(self, prefix: str) -> None:
        """Forget the tensors whose names start so."""
        self._places = {name: place for name, place in self._places.items() if not name.startswith(prefix)}

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor, still in the file: it is loaded when it is copied.

        Raises:
            ModelError: it has another ``shape``, or its file cannot be read.
        """
        file, opened, stored = self._places[name]
        try:
            tensor: Tensor = opened.get_tensor(stored)
            if name in self._parts:
                index, turned = self._parts[name]
                tensor = tensor[index].T if turned else tensor[index]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
        if shape is not None and tensor.shape != shape:
            raise ModelError(f"{file}: {name} has shape {list(tensor.shape)}, the config says {list(shape)}")
        return tensor


def listed(names: Collection[str], limit: int = 8) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors, or an index of them."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def _files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files with weights, and the file of each tensor that an index names (empty: there is no index)."""
    index = folder / INDEX
    if index.is_file():
        shards = _read_index(index)
        files = [folder / name for name in sorted(set(shards.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {listed(missing)}, named by {INDEX}")
        return files, shards
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if files:
        return files, {}
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickles:
        raise ModelError(
            f"{folder} has weights only as pickles ({listed(pickles)}), which can run code when opened; "
            "convert them to safetensors first"
        )
    raise ModelError(f"{folder} has no *.safetensors")


def _read_index(path: Path) -> Mapping[str, str]:
    """The file name of each tensor, from an index.

    Raises:
        ModelError: it is not an index, or names a file that is not below its folder.
    """
    try:
        index = read_json_file(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not an index of safetensors: {error}") from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, Mapping) or not all(isinstance(name, str) for name in shards.values()):
        raise ModelError(f"{path} is not an index of safetensors: weight_map must map tensors to file names")
    for name in sorted(set(shards.values())):
        parts = PurePath(name).parts
        if not parts or PurePath(name).is_absolute() or ".." in parts or "\0" in name or len(name) > 255:
            raise ModelError(f"{path} names the file {name[:80]!r}, which is not in its folder")
    return shards


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """A linear layer of the decoder, and the modules of the checkpoint whose outputs it stacks.

    ``modules`` are names and outputs, in order. ``inputs`` and ``bias`` are the same for all of them. ``parts`` are the
    ranges of each module's outputs that it stacks, in this order (None: all of them). ``again`` is the module whose
    outputs come once more behind all.
    """

    modules: Mapping[str, int]
    inputs: int
    bias: bool
    parts: tuple[tuple[tuple[int, int], ...], ...] | None = None
    again: str | None = None


class ExpertPlace(NamedTuple):
    """The two linear layers of an expert."""

    gate_up: LinearPlace
    down: LinearPlace


def interleaved(groups: int, sizes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ranges of outputs that are stored group by group, each with parts of these ``sizes``: those of all groups for
    the first of the ``wanted`` parts, then for the next one.
    """
    width = sum(sizes)
    begins = [sum(sizes[:part]) for part in range(len(sizes))]
    return tuple(
        (group * width + begins[part], group * width + begins[part] + sizes[part])
        for part in wanted
        for group in range(groups)
    )
