"""PEFT's ``adapter_config.json``: which modules an adapter changes, with which rank and scale.

A setting that changes what the adapter computes, and that is not supported, is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.adapters import AdapterError
from headrace.expressions import is_slow

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
