"""Reads the rotary embedding of a config.

Newer configs have ``rope_parameters`` (nested by layer type if layers differ), older ones ``rope_theta`` and
``rope_scaling``; both mean the same. If a config has both, ``rope_scaling`` applies: users add it for longer contexts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.spec import ModelError, RopeKind, RopeSpec

_KINDS: dict[str, RopeKind] = {kind: kind for kind in get_args(RopeKind) if kind != "none"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_STRETCHED = {"factor", "original_max_position_embeddings"}
_FIELDS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": _STRETCHED,  # transformers accepts the length and takes that of the config, as here
    "llama3": _STRETCHED | {"low_freq_factor", "high_freq_factor"},
    "yarn": _STRETCHED
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"finetuned"},  # a note on how the model was made
    "longrope": _STRETCHED | {"attention_factor", "short_factor", "long_factor"},
}
"""The fields of each type. Any other would change results in an engine that knows it."""

_OF_OTHER_TYPES = frozenset[str]().union(*_FIELDS.values())


class RopeReading(NamedTuple):
    """What a family's code reads of a rope.

    ``local``: sliding layers have one of their own. ``partial``: ``partial_rotary_factor``. ``alpha``: the type
    "dynamic" with ``alpha``, which stretches the base by a constant. ``sections``: ``mrope_section``, where text has
    the same position in all sections. ``longrope``: early names of that type.
    """

    local: bool = False
    partial: bool = False
    alpha: bool = False
    sections: bool = False
    longrope: tuple[str, ...] = ()


PLAIN_ROPE = RopeReading()
"""A rope that rotates whole heads, the same in all layers."""


def ropes_of(read: ConfigReader, head_dim: int, reading: RopeReading) -> tuple[RopeSpec, ...]:
    """The model's ropes: one, or with ``reading.local`` one for full layers and one for sliding layers."""
    scaling = read.object("rope_scaling")
    given = read.object("rope_parameters") if read.given("rope_parameters") or not scaling else {}
    nested = _LAYER_TYPES & set(given)
    if nested and not reading.local:
        raise ModelError(f"{read.architecture}: rope_parameters by layer type ({', '.join(sorted(nested))})")
    if nested:
        _only(given, _LAYER_TYPES | _ALWAYS, "rope_parameters by layer type")
    by_type = ConfigReader(f"{read.architecture} rope_parameters", given, {})
    full = by_type.object("full_attention") if nested else given
    if scaling:
        kept = ("rope_theta", "partial_rotary_factor")
        full = {name: full[name] for name in kept if name in full} | dict(scaling)
    ropes = [_rope(read, full, read.number("rope_theta"), head_dim, reading)]
    if reading.local:
        sliding = by_type.object("sliding_attention") if nested else {}
        ropes.append(_rope(read, sliding, read.number("rope_local_base_freq"), head_dim, reading))
    return tuple(ropes)


def _rope(
    read: ConfigReader, given: Mapping[str, Any], theta: float, head_dim: int, reading: RopeReading
) -> RopeSpec:
    kind, given, theta = _typed(read, given, theta, head_dim, reading)
    _only(given, _FIELDS[kind] | _ALWAYS, f"rope type '{kind}'")
    scaling = ConfigReader(f"{read.architecture} rope", given, {})
    rotary_dim = _rotary_dim(read, scaling, head_dim, reading)
    positions = read.integer("max_position_embeddings")
    original = positions
    if kind in ("llama3", "yarn", "longrope"):
        original = (
            read.optional_integer("original_max_position_embeddings")
            or scaling.optional_integer("original_max_position_embeddings")
            or positions
        )
    factor = scaling.optional_number("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise ModelError(f"rope type '{kind}' needs a factor")
        factor = positions / original
    return RopeSpec(
        theta=scaling.optional_number("rope_theta") or theta,
        rotary_dim=rotary_dim,
        original_positions=original,
        kind=_KINDS[kind],
        factor=factor,
        attention_factor=_attention_factor(kind, scaling, factor, original),
        low_freq_factor=scaling.optional_number("low_freq_factor") or 1.0,
        high_freq_factor=scaling.optional_number("high_freq_factor") or 4.0,
        beta_fast=scaling.optional_number("beta_fast") or 32.0,
        beta_slow=scaling.optional_number("beta_slow") or 1.0,
        truncate=given.get("truncate") is None or scaling.flag("truncate"),
        short_factor=_factors(given, kind, "short_factor", rotary_dim),
        long_factor=_factors(given, kind, "long_factor", rotary_dim),
    )


def _typed(
    read: ConfigReader, given: Mapping[str, Any], theta: float, head_dim: int, reading: RopeReading
) -> tuple[str, Mapping[str, Any], float]:
    """The type of a rope by its name in `_KINDS`, the fields that it has beside, and its base."""
    named = given.get("rope_type") or given.get("type")
    kind = named or "default"
    if kind in reading.longrope:
        kind = "longrope"
    if kind == "mrope" and reading.sections:
        kind = named = "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelError(f"rope type '{kind}' is not supported; supported are: {', '.join(_KINDS)}")
    if reading.sections:
        given = {name: value for name, value in given.items() if not name.startswith("mrope_")}
    elif given.get("mrope_section"):
        raise ModelError("mrope_section: multimodal rotary embeddings are not supported")
    if reading.alpha and kind == "dynamic" and given.get("alpha") and head_dim > 2:
        scaling = ConfigReader(f"{read.architecture} rope", given, {})
        theta = scaling.optional_number("rope_theta") or theta
        return "default", {}, theta * scaling.number("alpha") ** (head_dim / (head_dim - 2))
    if named == "default":  # tools leave fields of other types behind, which no engine reads
        given = {name: value for name, value in given.items() if name not in _OF_OTHER_TYPES}
    return kind, given, theta


def _rotary_dim(read: ConfigReader, scaling: ConfigReader, head_dim: int, reading: RopeReading) -> int:
    partial = scaling.optional_number("partial_rotary_factor") or read.optional_number(
        "partial_rotary_factor"
    )
    if partial is not None and partial != 1.0 and not reading.partial:
        raise ModelError(
            f"{read.architecture}: partial_rotary_factor is {partial}, but this family rotates whole heads; remove the "
            "field"
        )
    rotary_dim = int(head_dim * (partial or 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        if partial is None:
            raise ModelError(f"rotary embeddings rotate features in pairs, but head_dim is {head_dim}")
        raise ModelError(
            f"partial_rotary_factor {partial} of head_dim {head_dim} does not give an even number"
        )
    return rotary_dim


def _only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for field, value in given.items():
        if field not in known and value is not None:
            raise ModelError(f"{where}: {field} is not supported; supported are: {', '.join(sorted(known))}")


def _attention_factor(kind: str, scaling: ConfigReader, factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    given = scaling.optional_number("attention_factor")
    if given is not None:
        return given
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    over, under = scaling.optional_number("mscale"), scaling.optional_number("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)


def _factors(given: Mapping[str, Any], kind: str, field: str, rotary_dim: int) -> tuple[float, ...]:
    if kind != "longrope":
        return ()
    factors, count = given.get(field), rotary_dim // 2
    listed = factors if isinstance(factors, list) else []
    if len(listed) != count or not all(isinstance(factor, int | float) for factor in listed):
        raise ModelError(f"rope type 'longrope' needs {field}, a list of {count} numbers")
    return tuple(map(float, listed))
