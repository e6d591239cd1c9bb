"""The files of a checkpoint: which tensors they contain; each is read on demand.

Only safetensors are supported: the older ``.bin``/``.pt`` files are pickles, which can run code when opened. `layout`
has the names of the tensors, and `weights` assembles them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.compute.model.spec import ModelError

INDEX = "model.safetensors.index.json"


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
        for file in _files(folder):
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                names = list(opened.keys())
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
            self._places.update((plain_name(name), (file, opened, name)) for name in names)

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

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor, still in the file: it is loaded when it is copied.

        Raises:
            ModelError: it has another ``shape``, or its file cannot be read.
        """
        file, opened, stored = self._places[name]
        try:
            tensor: Tensor = opened.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
        if shape is not None and tensor.shape != shape:
            raise ModelError(f"{file}: {name} has shape {list(tensor.shape)}, the config says {list(shape)}")
        return tensor


def listed(names: Collection[str], limit: int = 8) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            shards: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            files = [folder / name for name in sorted(set(shards.values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is not an index of safetensors: {error!r}") from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {listed(missing)}, named by {INDEX}")
        return files
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickles:
        raise ModelError(
            f"{folder} has weights only as pickles ({listed(pickles)}), which can run code when opened; "
            "convert them to safetensors first"
        )
    raise ModelError(f"{folder} has no *.safetensors")
