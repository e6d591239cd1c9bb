"""An adapter's files: ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT writes them.

The files are read as a whole, and their digest names the adapter everywhere: in the keys of blocks and of cached
responses, and in the engine. So other weights under the same name are another adapter.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from headrace.compute.adapters.layout import AdapterLayout, Fused, Module
from headrace.compute.checkpoint import listed
from headrace.compute.kernels.adapters import Change, LayerChanges, Part, of_expert
from headrace.compute.model.weights import plain_name
from headrace.core.adapters import AdapterError, AdapterMissing
from headrace.expressions import is_slow

# PEFT's ``adapter_config.json``: which modules an adapter changes, with which rank and scale.
#
# A setting that changes what the adapter computes, and that is not supported, is refused by its name.

CONFIG = "adapter_config.json"

_WITHOUT_EFFECT = frozenset(
    {
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "corda_config",
            "eva_config",
            "inference_mode",
            "lora_dropout",
        ),
        *("loftq_config", "megatron_core", "revision", "runtime_config", "task_type"),
        *("lora_ga_config", "qalora_group_size", "layers_pattern", "ensure_weight_tying"),
    }
)
"""Settings of training and of saving; a group size has no effect without the method that it belongs to."""

_READ = frozenset(
    {
        *(
            "peft_type",
            "peft_version",
            "r",
            "lora_alpha",
            "use_rslora",
            "target_modules",
            "exclude_modules",
            "rank_pattern",
        ),
        *("alpha_pattern", "layers_to_transform", "init_lora_weights", "bias", "target_parameters"),
    }
)

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that are saved whole",
    "lora_bias": "biases of LoRA layers",
    "fan_in_fan_out": "weights stored as [in, out]",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens of the embedding",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "megatron_config": "layers of Megatron",
}
"""Settings with an effect that is not supported, and what they mean."""

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values of a training that leave the base model as it is; others belong to changed base weights."""

ALL_LINEAR = "all-linear"

MAX_PATTERN_CHARACTERS = 10_000
MAX_LOOPS, MAX_CHOICES = 4, 5000
"""Repetitions without a limit in a pattern, and its ways beside them: names of modules are short."""

MAX_SHOWN = 200
"""Characters of a setting that a message quotes."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The settings of an adapter that have an effect; ``version`` is that of PEFT which wrote it, if it is known."""

    rank: int
    alpha: float
    rank_stabilized: bool
    target: str | tuple[str, ...]
    exclude: str | tuple[str, ...]
    layers: frozenset[int] | None
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    parameters: tuple[str, ...] = ()
    version: tuple[int, int] | None = None

    def rank_of(self, module: str) -> int:
        """The rank of a module's change."""
        return int(_found(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of a module's change (arXiv:2106.09685, arXiv:2312.03732)."""
        rank = self.rank_of(module)
        alpha = float(_found(self.alphas, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def changes(self, module: str, layer: int) -> bool:
        """Whether the adapter should have tensors for a module, by its name in the base model."""
        chosen = self.target == ALL_LINEAR or _names(self.target, module)
        listed = self.layers is None or layer in self.layers
        return chosen and listed and not (self.exclude and _names(self.exclude, module))


def read_config(text: bytes) -> AdapterConfig:
    """The settings in the text of `CONFIG`.

    Raises:
        AdapterError: it is no such file, or has a setting that is not supported.
    """
    try:
        given = json.loads(text)
    except RecursionError:
        raise AdapterError(f"{CONFIG} is nested too deeply") from None
    except ValueError as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise AdapterError(f"{CONFIG} is not a JSON object")
    _refuse(given)
    ranks, alphas = (_pattern(given, name) for name in ("rank_pattern", "alpha_pattern"))
    parameters = _parameters(given)
    return AdapterConfig(
        rank=_rank(given.get("r"), "r"),
        alpha=_number(given.get("lora_alpha"), "lora_alpha"),
        rank_stabilized=_switch(given, "use_rslora"),
        target=_modules(given, "target_modules", needed=not parameters),
        exclude=_modules(given, "exclude_modules", needed=False),
        layers=_layers(given.get("layers_to_transform")),
        ranks={name: _rank(value, f"rank_pattern {name}") for name, value in ranks.items()},
        alphas={name: _number(value, f"alpha_pattern {name}") for name, value in alphas.items()},
        parameters=parameters,
        version=_version(given.get("peft_version")),
    )


def _refuse(given: Mapping[str, Any]) -> None:
    if given.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type is {_shown(given.get('peft_type'))}; only LORA is supported")
    for name, what in _REFUSED.items():
        if given.get(name):
            raise AdapterError(f"{CONFIG}: {name}: {what}: not supported")
    if given.get("bias", "none") != "none":
        raise AdapterError(
            f"{CONFIG}: bias is {_shown(given['bias'])}: trained biases are not supported, only none"
        )
    start = given.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise AdapterError(
            f"{CONFIG}: init_lora_weights is {_shown(start)}, which belongs to changed base weights; convert the"
            " adapter to a plain one when it is saved"
        )
    known = _READ | _WITHOUT_EFFECT | _REFUSED.keys()
    unknown = sorted(name for name, value in given.items() if value and name not in known)
    if unknown:
        raise AdapterError(f"{CONFIG}: {', '.join(unknown)}: unknown settings, which may change the result")
    pattern = given.get("layers_pattern")
    if given.get("layers_to_transform") is not None and pattern not in (None, "layers", ["layers"]):
        raise AdapterError(f"{CONFIG}: layers_pattern is {_shown(pattern)}; only 'layers' is supported")


def _rank(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{CONFIG}: {name} must be a rank of at least 1, got {_shown(value)}")
    return value


def _layers(value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    each = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in each):
        raise AdapterError(
            f"{CONFIG}: layers_to_transform must be the number of a layer or a list of them, got {_shown(value)}"
        )
    return frozenset(each)


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(f"{CONFIG}: {name} must be a number, got {_shown(value)}")
    return float(value)


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise AdapterError(f"{CONFIG}: {name} must be true or false, got {_shown(value)}")
    return value


def _modules(given: Mapping[str, Any], name: str, *, needed: bool = True) -> str | tuple[str, ...]:
    value = given.get(name)
    if not value and not needed:
        return ()
    if isinstance(value, str):
        _regex(value, name)
        return value
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise AdapterError(
            f"{CONFIG}: {name} must be a list of module names or a regular expression, got {_shown(value)}"
        )
    return tuple(value)


def _parameters(given: Mapping[str, Any]) -> tuple[str, ...]:
    value = given.get("target_parameters") or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise AdapterError(
            f"{CONFIG}: target_parameters must be a list of names of parameters, got {_shown(value)}"
        )
    return tuple(value)


def _version(value: Any) -> tuple[int, int] | None:
    """The first two numbers of a version; None if it has no such form."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})", value) if isinstance(value, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def _pattern(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{CONFIG}: {name} must be an object, got {_shown(value)}")
    for key in value:
        _regex(key, name)
    return value


def _regex(pattern: str, name: str) -> None:
    """Raise AdapterError unless ``pattern`` is an expression, alone and at the end of a name, that ends soon."""
    try:
        re.compile(pattern)
        re.compile(_ending(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(
            f"{CONFIG}: {name} has {_shown(pattern)}, which is no regular expression: {error}"
        ) from None
    if len(pattern) > MAX_PATTERN_CHARACTERS or is_slow(pattern, MAX_LOOPS, MAX_CHOICES):
        raise AdapterError(
            f"{CONFIG}: {name} has {_shown(pattern)}, which may take long to search; write a simpler regular expression"
            " or list the names of the modules"
        )


def _ending(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _names(modules: str | Sequence[str], module: str) -> bool:
    """Whether a setting names a module: a regular expression of the whole name, or names and ends of names."""
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == each or module.endswith(f".{each}") for each in modules)


def _found(values: Mapping[str, float], module: str, default: float) -> float:
    """The first value whose pattern is the end of a module's name."""
    for pattern, value in values.items():
        if re.match(_ending(pattern), module):
            return value
    return default


# Changes of parameters that hold the experts of a layer (``target_parameters``), as PEFT stores them.
#
# PEFT wraps a parameter as one linear layer whose rank is divided between the experts. Of two parameters of a
# module, the wrapper of the second holds that of the first:
#
#  …mlp.experts.base_layer.lora_A.weight  [experts * rank, inputs]    gate_up_proj
#  …mlp.experts.base_layer.lora_B.weight  [outputs, rank * experts]
#  …mlp.experts.lora_A.weight             …                           down_proj; or gate_up_proj, if it is alone

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

_WRAPPED = ".base_layer"
_SWAPPED = (0, 19)
"""The version of PEFT since which the first matrix has the inputs of a parameter [experts, outputs, inputs] too."""
_BLOCKS = ("mlp", "block_sparse_moe")
"""Where transformers has the experts, whatever a checkpoint calls the module."""


class Changed(NamedTuple):
    """What an expert's linear layer ``name`` gets: ``down`` [rank, inputs], ``up`` [outputs, rank] with the scale."""

    layer: int
    name: str
    down: Tensor
    up: Tensor


def take_parameters(
    tensors: dict[str, Tensor], layout: AdapterLayout, config: AdapterConfig, max_rank: int
) -> list[Changed]:
    """The changes of parameters, whose tensors are removed from ``tensors``.

    Raises:
        AdapterError: a parameter that the config names does not exist, or its tensors are missing or of another shape.
    """
    if not config.parameters:
        return []
    stored = {plain_name(name.removeprefix(PREFIX)): name for name in tensors}
    found: list[Changed] = []
    named: set[str] = set()
    for module in dict.fromkeys(each.module for each in layout.fused):
        fused = [each for each in layout.fused if each.module == module]
        wanted = {path: [each for each in fused if _targets(path, each, config)] for path in _paths(module)}
        paths = [path for path, each in wanted.items() if each]
        if not paths:
            continue
        path = next((each for each in paths if f"{each}{DOWN}" in stored), paths[0])
        named.update(target for each in wanted[path] for target in _targets(path, each, config))
        found += _of_module(tensors, stored, path, wanted[path], config, max_rank)
    if missing := sorted(set(config.parameters) - named):
        raise AdapterError(
            f"{CONFIG}: target_parameters: {layout.architecture} has no parameters {listed(missing)} that adapters can"
            " change"
        )
    return found


def _paths(module: str) -> list[str]:
    """The names that a module of experts may have."""
    block = module.removesuffix(".experts").rpartition(".")[2]
    others = (module.replace(f".{block}.", f".{other}.") for other in _BLOCKS if other != block)
    return [module, *others]


def _targets(path: str, fused: Fused, config: AdapterConfig) -> list[str]:
    """What names a parameter among the targets."""
    name = f"{path}.{fused.name}"
    return [each for each in config.parameters if name == each or name.endswith(f".{each}")]


def _of_module(
    tensors: dict[str, Tensor],
    stored: dict[str, str],
    path: str,
    wanted: list[Fused],
    config: AdapterConfig,
    max_rank: int,
) -> Iterator[Changed]:
    for number, each in enumerate(wanted):
        wrapped = path + (len(wanted) - 1 - number) * _WRAPPED
        pair = []
        for end in (DOWN, UP):
            name = stored.get(wrapped + end)
            if name is None:
                raise AdapterError(f"{WEIGHTS} lacks {wrapped}{end}, the change of {each.name}")
            pair.append(tensors.pop(name))
        yield from _of_experts(each, f"{path}.{each.name}", pair[0], pair[1], config, max_rank)


def _of_experts(
    each: Fused, name: str, first: Tensor, second: Tensor, config: AdapterConfig, max_rank: int
) -> Iterator[Changed]:
    rank, experts = config.rank_of(name), each.experts
    if rank > max_rank:
        raise AdapterError(f"{name} has the rank {rank}, which is above --max-lora-rank {max_rank}")
    shapes = {
        (True, rank * experts, each.inputs, each.outputs),
        (False, rank * experts, each.outputs, each.inputs),
    }
    given = (*first.shape, *second.shape)
    fits = [
        straight
        for straight, ranks, inner, outer in shapes
        if given == (ranks, inner, outer, ranks) and (straight or not each.turned)
    ]
    if not fits or not (first.is_floating_point() and second.is_floating_point()):
        raise AdapterError(
            f"{WEIGHTS}: the change of {name} has the shapes {list(first.shape)} and {list(second.shape)}; this model"
            f" and the rank need {[rank * experts, each.inputs]} and {[each.outputs, rank * experts]}"
        )
    if len(fits) > 1 and config.version is None:
        raise AdapterError(
            f"{CONFIG}: peft_version is missing, and {name} is square: which matrix has its inputs depends on the"
            " version"
        )
    straight = fits[0] if len(fits) == 1 else config.version is not None and config.version >= _SWAPPED
    downs = first.view(experts, rank, -1)
    ups = second.view(-1, rank, experts).permute(2, 0, 1)
    if not straight:
        downs, ups = ups.transpose(1, 2), downs.transpose(1, 2)
    ups = ups.float() * config.scale_of(name)
    if each.turned and each.linear == "gate_up":
        ups = torch.cat((ups[:, 0::2], ups[:, 1::2]), 1)
    for expert in range(experts):
        linear = of_expert(each.linear, expert)
        yield Changed(each.layer, linear, downs[expert].contiguous(), ups[expert].contiguous())


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
