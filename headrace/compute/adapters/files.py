"""An adapter's files: ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT writes them.

The files are read as a whole, and their digest names the adapter everywhere: in the keys of blocks and of cached
responses, and in the engine. So other weights under the same name are another adapter.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from headrace.compute.adapters.config import CONFIG, AdapterConfig, read_config
from headrace.compute.adapters.layout import AdapterLayout, Module
from headrace.compute.adapters.parameters import DOWN, PREFIX, UP, WEIGHTS, Changed, take_parameters
from headrace.compute.checkpoint import listed
from headrace.compute.kernels.adapters import Change, LayerChanges, Part
from headrace.compute.model.weights import plain_name
from headrace.core.adapters import AdapterError, AdapterMissing

MAX_CONFIG_BYTES = 1 << 20
HEADER_BYTES = 16 << 20
"""The largest header of a safetensors file that is read, beside the tensors."""

_LAYERS = "layers."


class Adapter(NamedTuple):
    """An adapter in host memory, in the dtype of activations; ``digest`` is that of its files."""

    digest: str
    rank: int
    layers: LayerChanges


def read_adapter(folder: Path, layout: AdapterLayout, dtype: torch.dtype, max_rank: int) -> Adapter:
    """The adapter in ``folder``, for a model of this ``layout``.

    Raises:
        AdapterMissing: a file is missing.
        AdapterError: a file is broken or too large; a setting is not supported; a tensor is missing, unknown
            or of another shape; or a rank is above ``max_rank``.
    """
    config_text = _read(folder, CONFIG, MAX_CONFIG_BYTES)
    config = read_config(config_text)
    _check_rank(config, max_rank)
    weights = _read(folder, WEIGHTS, layout.nbytes(max_rank, torch.float32.itemsize) + HEADER_BYTES)
    digest = hashlib.sha256(len(config_text).to_bytes(8, "little") + config_text + weights).hexdigest()
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise AdapterError(f"{WEIGHTS} cannot be read as safetensors: {error}") from None
    except KeyError as error:  # a dtype of the format that torch does not have
        raise AdapterError(f"{WEIGHTS} has the dtype {error}, which is not supported") from None
    fused = take_parameters(tensors, layout, config, max_rank)
    pairs = _by_module(tensors, layout, config) if tensors or not fused else {}
    return Adapter(digest, config.rank, _changes(pairs, fused, layout, config, dtype, max_rank))


def _read(folder: Path, name: str, most: int) -> bytes:
    try:
        # Opened once, so that what is read is what was checked; a pipe would be waited for, and a device has no end.
        with open(
            folder / name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
        ) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise AdapterError(f"{name} is not a file")
            if found.st_size > most:
                raise AdapterError(
                    f"{name} has {found.st_size:,} bytes; an adapter of this server's model has at most {most:,}"
                )
            return file.read(most)
    except IsADirectoryError:
        raise AdapterError(f"{name} is not a file") from None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        pickled = name == WEIGHTS and (folder / "adapter_model.bin").exists()
        remedy = (
            "; adapter_model.bin is a pickle, which can run code when opened: save it as safetensors"
            if pickled
            else ""
        )
        kind = AdapterMissing if missing and not pickled else AdapterError
        raise kind(f"{name} cannot be read: {error.strerror or error}{remedy}") from None


def _check_rank(config: AdapterConfig, max_rank: int) -> None:
    highest = max([config.rank, *config.ranks.values()])
    if highest > max_rank:
        raise AdapterError(f"{CONFIG}: the rank {highest} is above --max-lora-rank {max_rank}")


class _Pair(NamedTuple):
    """The tensors of a module: ``down`` [rank, in] and ``up`` [out, rank], and its name in the base model."""

    stored: str
    down: Tensor
    up: Tensor


def _by_module(
    tensors: Mapping[str, Tensor], layout: AdapterLayout, config: AdapterConfig
) -> Mapping[str, _Pair]:
    """The tensors of each module, which are exactly those that the config and the model ask for."""
    found: dict[str, dict[str, tuple[str, Tensor]]] = {}
    unknown = []
    for name, tensor in tensors.items():
        suffix = next((each for each in (DOWN, UP) if name.endswith(each)), None)
        stored = name.removeprefix(PREFIX).removesuffix(suffix or "")
        module = plain_name(f"{stored}.").removesuffix(".")
        if suffix is None or not name.startswith(PREFIX) or module not in layout.modules:
            unknown.append(name)
        elif suffix in found.setdefault(module, {}):
            raise AdapterError(f"{WEIGHTS} has {module}{suffix} twice")
        else:
            found[module][suffix] = stored, tensor
    if unknown:
        raise AdapterError(
            f"{WEIGHTS} has tensors of modules that adapters cannot change in {layout.architecture}: {listed(unknown)}"
        )
    if not found:
        raise AdapterError(f"{WEIGHTS} has no tensors of LoRA layers")
    missing = [
        f"{module}{suffix}" for module, pair in found.items() for suffix in (DOWN, UP) if suffix not in pair
    ]
    if missing:
        raise AdapterError(f"{WEIGHTS} lacks {listed(missing)}")
    pairs = {module: _Pair(pair[DOWN][0], pair[DOWN][1], pair[UP][1]) for module, pair in found.items()}
    _check_targets(pairs, layout, config)
    return pairs


def _check_targets(pairs: Mapping[str, _Pair], layout: AdapterLayout, config: AdapterConfig) -> None:
    """Raise AdapterError unless the modules with tensors are those that the config names."""
    stems = {pair.stored.partition(_LAYERS)[0] for pair in pairs.values()}
    if len(stems) != 1:
        raise AdapterError(f"{WEIGHTS} has modules of several models: {listed(stems)}")
    (stem,) = stems
    # Where a model has its experts as parameters, PEFT finds no modules of them, whatever the targets say.
    routed = any(layout.modules[module].routed for module in pairs)
    targets = {
        module
        for module, place in layout.modules.items()
        if (routed or not place.routed)
        and config.changes(stem + _LAYERS + module.partition(_LAYERS)[2], place.layer)
    }
    if missing := targets - pairs.keys():
        raise AdapterError(f"{WEIGHTS} lacks the modules {listed(missing)}, which {CONFIG} names as targets")
    if unexpected := pairs.keys() - targets:
        raise AdapterError(
            f"{WEIGHTS} has the modules {listed(unexpected)}, which {CONFIG} does not name as targets"
        )


def _changes(
    pairs: Mapping[str, _Pair],
    fused: Sequence[Changed],
    layout: AdapterLayout,
    config: AdapterConfig,
    dtype: torch.dtype,
    max_rank: int,
) -> LayerChanges:
    parts: list[dict[str, list[tuple[Tensor, Part]]]] = [{} for _ in range(layout.layers)]
    for module, place in layout.modules.items():
        pair = pairs.get(module)
        if pair is not None:
            _check_shapes(module, pair, place, config, max_rank)
            up = pair.up.float() * config.scale_of(pair.stored)
            down, up = pair.down.to(dtype), (up if place.order is None else up[place.order]).to(dtype)
            if not (down.isfinite().all() and up.isfinite().all()):
                raise AdapterError(f"{WEIGHTS}: {module} has values that are not finite in {dtype}")
            parts[place.layer].setdefault(place.name, []).append((down, Part(place.offset, up.contiguous())))
    for layer, name, down, up in fused:
        down, up = down.to(dtype), up.to(dtype)
        if not (down.isfinite().all() and up.isfinite().all()):
            raise AdapterError(
                f"{WEIGHTS}: {name} in layer {layer} has values that are not finite in {dtype}"
            )
        parts[layer].setdefault(name, []).append((down, Part(0, up)))
    return [{name: _joined(each) for name, each in layer.items()} for layer in parts]


def _joined(parts: Sequence[tuple[Tensor, Part]]) -> Change:
    return Change(torch.cat([down for down, _ in parts]), tuple(part for _, part in parts))


def _check_shapes(module: str, pair: _Pair, place: Module, config: AdapterConfig, max_rank: int) -> None:
    rank = config.rank_of(pair.stored)
    if rank > max_rank:
        raise AdapterError(f"{module} has the rank {rank}, which is above --max-lora-rank {max_rank}")
    for name, tensor, shape in (
        (f"{module}{DOWN}", pair.down, (rank, place.inputs)),
        (f"{module}{UP}", pair.up, (place.outputs, rank)),
    ):
        if tuple(tensor.shape) != shape:
            raise AdapterError(
                f"{WEIGHTS}: {name} has the shape {list(tensor.shape)}; this model and the rank need {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise AdapterError(
                f"{WEIGHTS}: {name} has the dtype {tensor.dtype}; floating-point numbers are needed"
            )
