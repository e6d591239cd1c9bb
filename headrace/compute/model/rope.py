"""Rotary tables, and their settings in a config: the cosines and signed sines of every position, for the kernels.

They are computed once for the maximum context length, so a position's rotation does not depend on its request. So keys
can be shared between sequences, and chunked prefill gives the same result as a whole one. Two published schemes
(dynamic, longrope) depend on the length of the running sequence; here they use the maximum context length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.spec import RopeKind, RopeSpec

# Reads the rotary embedding of a config.
#
# Newer configs have ``rope_parameters`` (nested by layer type if layers differ), older ones ``rope_theta`` and
# ``rope_scaling``; both mean the same. If a config has both, ``rope_scaling`` applies: users add it for longer
# contexts.

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
    "proportional": {"factor"},
}
"""The fields of each type. Any other would change results in an engine that knows it."""

_OF_OTHER_TYPES = frozenset[str]().union(*_FIELDS.values())


class Sections(NamedTuple):
    """How pairs are divided between the positions of an image's token: ``sizes`` are those of time, rows and columns
    where the config has no ``mrope_section``. ``interleaved``: pairs of rows and columns stand between those of time.
    """

    sizes: tuple[int, int, int]
    interleaved: bool = False

    def axes(self, given: object, pairs: int) -> tuple[int, ...]:
        """The axis of each pair, with the sizes ``given`` in a config or None."""
        sizes = given if isinstance(given, list) else self.sizes
        if len(sizes) != 3 or not all(type(size) is int and size >= 0 for size in sizes):
            raise ModelError(
                f"mrope_section must be a list of three whole numbers, the config has {given!r:.80}"
            )
        if self.interleaved:
            reaches = (0, *(3 * size for size in sizes[1:]))
            return tuple([pair % 3 if pair < reaches[pair % 3] else 0 for pair in range(pairs)])
        if sum(sizes) != pairs:
            raise ModelError(
                f"mrope_section {list(sizes)} divides {sum(sizes)} pairs of features, but {pairs} rotate"
            )
        return tuple([axis for axis, size in enumerate(sizes) for _ in range(size)])


class RopeReading(NamedTuple):
    """What a family's code reads of a rope.

    ``local``: sliding layers have one of their own. ``partial``: ``partial_rotary_factor``, which ``dimensions``
    may also say, as ``rotary_dim``. ``alpha``: the type
    "dynamic" with ``alpha``, which stretches the base by a constant. ``sections``: ``mrope_section``; text has the
    same position in all sections. ``longrope``: early names of that type. ``proportional``: the type of that name,
    whose ``partial_rotary_factor`` is the share of pairs that rotate, in heads that are rotated whole.
    """

    local: bool = False
    partial: bool = False
    dimensions: bool = False
    alpha: bool = False
    sections: Sections | None = None
    longrope: tuple[str, ...] = ()
    proportional: bool = False


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
    divided = given.get("mrope_section")
    kind, given, theta = _typed(read, given, theta, head_dim, reading)
    _only(given, _FIELDS[kind] | _ALWAYS, f"rope type '{kind}'")
    scaling = ConfigReader(f"{read.architecture} rope", given, {})
    proportional = kind == "proportional"
    rotary_dim = head_dim if proportional else _rotary_dim(read, scaling, head_dim, reading)
    share = (scaling.optional_number("partial_rotary_factor") or 1.0) if proportional else 1.0
    if share > 1.0:
        raise ModelError(f"{read.architecture}: partial_rotary_factor is {share}, more than all")
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
        share=share,
        axes=reading.sections.axes(divided, rotary_dim // 2) if reading.sections else (),
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
    known = [each for each in _KINDS if each != "proportional" or reading.proportional]
    if not isinstance(kind, str) or kind not in known:
        raise ModelError(f"rope type '{kind}' is not supported; supported are: {', '.join(known)}")
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
    if partial is None and reading.dimensions and (rotated := read.optional_integer("rotary_dim")):
        partial = rotated / head_dim
    if partial is not None and partial != 1.0 and not reading.partial:
        raise ModelError(
            f"{read.architecture}: partial_rotary_factor is {partial}, but this family rotates whole heads; remove the "
            "field"
        )
    rotary_dim = int(head_dim * min(partial or 1.0, 2.0))  # a factor above 1 is refused
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


_POSITIONS_AT_ONCE = 2048
"""Positions of a table that are computed at once, which limits the temporary memory to about 5 MB."""


def rope_table(rope: RopeSpec, max_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """Float32 [max_positions, 2, rotary_dim]: cosines, then sines with the sign of the half-rotation."""
    frequencies = _frequencies(rope, max_positions).to(device)
    table = torch.empty((max_positions, 2, rope.rotary_dim), dtype=torch.float32, device=device)
    for begin in range(0, max_positions, _POSITIONS_AT_ONCE):
        some = table[begin : begin + _POSITIONS_AT_ONCE]
        positions = torch.arange(begin, begin + len(some), dtype=torch.float32, device=device)
        angles = positions[:, None] * frequencies
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        some[:, 0] = torch.cat((cos, cos), -1)
        some[:, 1] = torch.cat((-sin, sin), -1)
    return table


def feature_axes(rope: RopeSpec, device: torch.device | str = "cpu") -> Tensor | None:
    """The axis int64 [rotary_dim] by which each feature rotates; None: tokens have one position."""
    return torch.tensor(2 * rope.axes, device=device) if rope.axes else None


def _frequencies(rope: RopeSpec, max_positions: int) -> Tensor:
    """Radians per position of each feature pair, float32 [rotary_dim / 2]."""
    size = rope.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    plain = torch.reciprocal(rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain
        case "none":
            return torch.zeros_like(plain)
        case "linear":
            return plain / rope.factor
        case "dynamic":
            length = max(max_positions, rope.original_positions)
            stretch = rope.factor * length / rope.original_positions - (rope.factor - 1)
            base = rope.theta * stretch ** (size / (size - 2))
            return torch.reciprocal(base**exponents)
        case "longrope":
            long = max_positions > rope.original_positions
            return plain / torch.tensor(rope.long_factor if long else rope.short_factor)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "proportional":
            plain[int(rope.share * size // 2) :] = 0
            return plain / rope.factor


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Slow features are divided by the factor, fast ones are kept, and those between are blended."""
    turns = rope.original_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Like llama3, but blended linearly over the feature's index between two numbers of turns."""

    def index_of(turns: float) -> float:
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    slow = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0, 1)
    return slow * plain / rope.factor + (1 - slow) * plain
