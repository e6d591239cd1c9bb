"""Reads the format of a checkpoint's linear layers: the ``quantization_config`` of its ``config.json``.

An unknown method, format or field is rejected by name, unless its value is neutral. Fields that only record how a
checkpoint was made are ignored. The layouts are in separate files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from headrace.compute.checkpoint import ModelError
from headrace.compute.quantization.layouts import (
    AwqLayout,
    Fp8Layout,
    GptqLayout,
    Int8Layout,
    Mxfp4Layout,
    PackedLayout,
)
from headrace.compute.quantization.scheme import LinearLayout, StoredFormat

_HEAD = "lm_head"
_GPTQ_NOTES = {
    *(
        "tokenizer",
        "dataset",
        "damp_percent",
        "damp_auto_increment",
        "true_sequential",
        "model_seqlen",
        "meta",
    ),
    *("act_group_aware", "backend", "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "static_groups", "model_name_or_path"),
    *(
        "model_file_base_name",
        "use_cuda_fp16",
        "use_exllama",
        "disable_exllama",
        "exllama_config",
        "quantizer",
    ),
    *("pack_dtype", "mse", "is_marlin_format", "desc_act", "sym"),
}
_AUTOROUND_NOTES = {
    *(
        "provider",
        "autoround_version",
        "iters",
        "lr",
        "minmax_lr",
        "nsamples",
        "seqlen",
        "scale_dtype",
        "amp",
    ),
    *("low_gpu_mem_usage", "enable_minmax_tuning", "enable_quanted_input", "gradient_accumulate_steps"),
    "to_quant_block_names",
}
# transformers and GPTQModel write AWQ's config with the fields of GPTQ's.
_AWQ_NOTES = (_GPTQ_NOTES | {"do_fuse", "fuse_max_seq_len", "modules_to_fuse"}) - {"desc_act"}
_CT_NOTES = {
    *("global_compression_ratio", "quantization_status", "version", "run_compressed", "dequantize"),
    *("provider", "use_optimized_inference"),
}
_WEIGHT_NOTES = {"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"}
_MXFP4_NOTES = {"dequantize"}
_FP8_NOTES = {"activation_scheme", "fmt", "scale_fmt", "expert_dtype", "dequantize"}

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Group:
    """Linear layers stored in the same way; ``closeness`` ranks how a module is named (0: by name; None: not named)."""

    closeness: Callable[[str], int | None]
    layout: LinearLayout


@dataclass(frozen=True, slots=True)
class _Format:
    """See `scheme.StoredFormat`."""

    name: str
    plain: Callable[[str], bool]
    groups: tuple[_Group, ...]

    def layout_of(self, module: str) -> LinearLayout | None:
        if self.plain(module):
            return None
        matches = [(group.closeness(module), group.layout) for group in self.groups]
        named = [(close, layout) for close, layout in matches if close is not None]
        return min(named, key=lambda each: each[0])[1] if named else None  # the first of equals


def read_format(config: Fields) -> StoredFormat:
    """The format that a ``quantization_config`` describes.

    Raises:
        ModelError: something in it is not supported; the message names it and what is supported.
    """
    method = config.get("quant_method")
    for named in (method, config.get("method") or method):  # newer tools write both
        if named not in _METHODS or named != method:
            raise ModelError(f"quantization_config: quant_method '{named}' is not supported; {SUPPORTED}")
    rest = {name: value for name, value in config.items() if name not in ("quant_method", "method")}
    return _METHODS[method](rest)


def _gptq(config: Fields) -> StoredFormat:
    _only(
        config,
        "gptq",
        _GPTQ_NOTES | _AUTOROUND_NOTES,
        *("bits", "group_size", "checkpoint_format", "format", "lm_head", "data_type"),
        *("modules_to_not_convert", "modules_in_block_to_quantize", "dynamic"),
    )
    rules = _rules(config)
    _allowed(config, "gptq", "data_type", ("int", None))
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"quantization_config: gptq checkpoint_format '{version}' is not supported; {SUPPORTED}"
        )
    chosen = [name for names in config.get("modules_in_block_to_quantize") or () for name in names]
    excluded = _entries(config, "modules_to_not_convert")
    head_too = config.get("lm_head") is True

    def plain(module: str) -> bool:
        if module == _HEAD and not head_too:
            return True
        if module != _HEAD and (_within(module, excluded) or bool(chosen and not _within(module, chosen))):
            return True
        rule = _rule_of(module, rules)
        return rule is not None and rule.fields is None

    def group(rule: _Rule | None, fields: Fields) -> _Group:
        _allowed(fields, "gptq", "bits", (4, 8))
        layout = GptqLayout(fields["bits"], _group_size(fields), zeros_less_one=version == "gptq")
        return _Group(lambda module: 0 if _rule_of(module, rules) is rule else None, layout)

    groups = [group(rule, {**config, **rule.fields}) for rule in rules if rule.fields is not None]
    return _Format("gptq", plain, (*groups, group(None, config)))


class _Rule(NamedTuple):
    """A rule of GPTQModel's ``dynamic``: modules whose names match have other ``fields``; None: are not quantized."""

    pattern: re.Pattern[str]
    fields: Fields | None


def _rules(config: Fields) -> list[_Rule]:
    given = config.get("dynamic") or {}
    if not isinstance(given, Mapping):
        raise ModelError(
            f"quantization_config: dynamic must be an object of fields by pattern, it is {given!r:.80}"
        )
    rules = []
    for text, fields in given.items():
        where = f"gptq dynamic {text!r:.80}"
        try:
            pattern = re.compile(text.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise ModelError(f"quantization_config: {where} is not a valid pattern: {error}") from error
        if not isinstance(fields, Mapping):
            raise ModelError(
                f"quantization_config: {where} must have an object of fields, it has {fields!r:.80}"
            )
        if not text.startswith("-:"):
            _only(fields, where, _GPTQ_NOTES, "bits", "group_size")
        rules.append(_Rule(pattern, None if text.startswith("-:") else fields))
    return rules


def _rule_of(module: str, rules: Sequence[_Rule]) -> _Rule | None:
    """The first rule that a module's name matches from its start."""
    names = _names(module)
    return next((rule for rule in rules if any(rule.pattern.match(name) for name in names)), None)


def _awq(config: Fields) -> StoredFormat:
    config = _renamed(config, {"w_bit": "bits", "q_group_size": "group_size"})  # AutoAWQ's own names
    _only(
        config,
        "awq",
        _AWQ_NOTES | _AUTOROUND_NOTES,
        *("bits", "group_size", "zero_point", "version", "checkpoint_format", "format", "data_type"),
        "modules_to_not_convert",
    )
    _allowed(config, "awq", "bits", (4,))
    _allowed(config, "awq", "data_type", ("int", None))
    for name in ("version", "checkpoint_format", "format"):
        _allowed(config, "awq", name, ("gemm", "GEMM", None))
    _allowed(config, "awq", "zero_point", (True,))
    excluded = [*_entries(config, "modules_to_not_convert"), _HEAD]
    layout = AwqLayout(_group_size(config))
    return _Format("awq", lambda module: _contains(module, excluded), (_Group(_any, layout),))


def _fp8(config: Fields) -> StoredFormat:
    _only(config, "fp8", _FP8_NOTES, "weight_block_size", "ignored_layers", "modules_to_not_convert")
    excluded = [*_entries(config, "modules_to_not_convert"), *_entries(config, "ignored_layers"), _HEAD]
    block = _block(config.get("weight_block_size"))
    # Activations beside a block's scale would need one for each of its groups: they are not quantized.
    layout = Fp8Layout(block, 8 if block is None else 16)
    return _Format("fp8", lambda module: _within(module, excluded), (_Group(_any, layout),))


def _mxfp4(config: Fields) -> StoredFormat:
    """Experts alone have it; ``*`` in a name of ``modules_to_not_convert`` stands for anything."""
    _only(config, "mxfp4", _MXFP4_NOTES, "modules_to_not_convert")
    excluded = [f"*.{entry}.*" for entry in _entries(config, "modules_to_not_convert")]

    def plain(module: str) -> bool:
        named = any(fnmatchcase(f".{name}.", entry) for entry in excluded for name in _names(module))
        return named or ".experts." not in module

    return _Format("mxfp4", plain, (_Group(_any, Mxfp4Layout()),))


def _compressed_tensors(config: Fields) -> StoredFormat:
    name = "compressed-tensors"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") == "dense":  # pruned, and stored whole
        config = {field: value for field, value in config.items() if field != "sparsity_config"}
    _only(config, name, _CT_NOTES, "config_groups", "format", "ignore")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"quantization_config: {name} has no config_groups")
    ignored = _entries(config, "ignore")
    return _Format(
        name,
        lambda module: _closeness(module, ignored) is not None,
        tuple(_ct_group(f"{name} {key}", group, config.get("format")) for key, group in groups.items()),
    )


def _ct_group(where: str, group: Any, usual_format: Any) -> _Group:
    if not isinstance(group, Mapping):
        raise ModelError(f"quantization_config: {where} must be an object, it is {group!r:.80}")
    _only(group, where, set(), "targets", "weights", "input_activations", "format")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ModelError(f"quantization_config: {where} has no weights")
    _only(
        weights,
        f"{where} weights",
        _WEIGHT_NOTES,
        *("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure"),
    )
    targets = _entries(group, "targets")
    layout = _ct_layout(where, weights, group.get("input_activations"), group.get("format") or usual_format)
    return _Group(lambda module: _closeness(module, targets), layout)


def _ct_layout(where: str, weights: Fields, activations: Any, stored: Any) -> LinearLayout:
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    symmetric = weights.get("symmetric", True) is True
    group_size = weights.get("group_size") if strategy == "group" else None
    match stored, kind, bits, strategy:
        case "pack-quantized", "int", 4 | 8, "group" | "channel":
            return PackedLayout(bits, group_size, symmetric, _activation_bits(where, activations))
        case "int-quantized", "int", 8, "group" | "channel" | "tensor":
            return Int8Layout(group_size, symmetric, _activation_bits(where, activations))
        case "float-quantized" | "naive-quantized", "float", 8, "channel" | "tensor" | "block":
            if strategy == "block":
                return Fp8Layout(_block(weights.get("block_structure")))
            return Fp8Layout(None, 8 if activations else 16)
    acting = " with quantized activations" if activations else ""
    raise ModelError(
        f"quantization_config: {where}: format '{stored}' of {bits}-bit {kind} with strategy '{strategy}'{acting} is"
        f" not supported; {SUPPORTED}"
    )


def _activation_bits(where: str, activations: Any) -> Literal[8, 16]:
    """16 if activations are not quantized, else 8: they can be quantized in one way."""
    if not activations:
        return 16
    asked = {name: activations.get(name) for name in ("num_bits", "type", "strategy", "symmetric", "dynamic")}
    if asked != {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}:
        shown = ", ".join(f"{name} {value}" for name, value in asked.items())
        raise ModelError(
            f"quantization_config: {where} input_activations ({shown}): only 8-bit int, symmetric, dynamic, per token"
            " is supported"
        )
    return 8


_METHODS: dict[Any, Callable[[Fields], StoredFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}

SUPPORTED = (
    "supported are gptq (gptq, gptq_v2; 4 and 8 bits), awq (gemm; 4 bits), compressed-tensors (pack-quantized,"
    " int-quantized, float-quantized, naive-quantized fp8), fp8 and mxfp4 (experts)"
)


def _any(module: str) -> int:
    return 0


def _only(config: Fields, where: str, notes: Collection[str], *known: str) -> None:
    """Raise ModelError for a field other than those, unless its value is neutral."""
    for name, value in config.items():
        if name not in {*notes, *known} and value not in (None, False, "", [], {}):
            raise ModelError(
                f"quantization_config: {where}: the field {name} ({value!r:.80}) is not supported"
            )


def _allowed(config: Fields, where: str, name: str, values: Collection[Any]) -> None:
    if config.get(name) not in values:
        shown = ", ".join(str(value) for value in values if value is not None)
        raise ModelError(
            f"quantization_config: {where} {name} {config.get(name)!r:.80} is not supported; it can be {shown}"
        )


def _group_size(config: Fields) -> int | None:
    size = config.get("group_size", 128)
    if size in (-1, None):
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ModelError(
            f"quantization_config: group_size must be a positive number or -1, it is {size!r:.80}"
        )
    return size


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = [int(part) for part in re.findall(r"\d+", str(value))]
    if len(sizes) != 2 or 0 in sizes:
        raise ModelError(f"quantization_config: a block must be outputs and inputs, it is {value!r:.80}")
    return sizes[0], sizes[1]


def _entries(config: Fields, name: str) -> list[str]:
    entries = config.get(name) or []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ModelError(f"quantization_config: {name} must be a list of names, it is {entries!r:.80}")
    for entry in entries:
        try:
            _pattern(entry)
        except re.error as error:
            raise ModelError(
                f"quantization_config: {name}: {entry!r:.80} is not a valid pattern: {error}"
            ) from error
    return entries


def _pattern(entry: str) -> re.Pattern[str] | None:
    """The pattern of an entry that starts with ``re:``."""
    return re.compile(entry.removeprefix("re:")) if entry.startswith("re:") else None


def _names(module: str) -> tuple[str, ...]:
    """The names that a module of a text model may have if the model is part of another."""
    return module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}"


def _within(module: str, entries: Collection[str]) -> bool:
    """Whether a module is, or is inside, a listed one, which may be given by a part of its path."""
    return any(f".{entry}." in f".{name}." for entry in entries for name in _names(module))


def _contains(module: str, entries: Collection[str]) -> bool:
    """Whether a name contains an entry anywhere: the rule of AutoAWQ, which writes these checkpoints."""
    return any(entry in name for entry in entries for name in _names(module))


def _renamed(config: Fields, names: Mapping[str, str]) -> Fields:
    """The config with older names of fields replaced by the newer ones.

    Raises:
        ModelError: both names are there with different values.
    """
    renamed = {name: value for name, value in config.items() if name not in names}
    for older, newer in names.items():
        if older in config:
            if newer in config and config[newer] != config[older]:
                raise ModelError(
                    f"quantization_config: {older} is {config[older]!r:.80}, and {newer} is {config[newer]!r:.80}"
                )
            renamed[newer] = config[older]
    return renamed


def _closeness(module: str, entries: Collection[str]) -> int | None:
    """compressed-tensors: 0 if a module is named by its path, 1 by a pattern after ``re:``, 2 by its class."""
    names = _names(module)
    if not set(names).isdisjoint(entries):
        return 0
    patterns = [pattern for pattern in map(_pattern, entries) if pattern]
    if any(pattern.match(name) for pattern in patterns for name in names):
        return 1
    return 2 if "Linear" in entries else None
