"""Mixtures of experts: the launches of `experts`, and the experts of a layer side by side in memory.

Experts that are alike are one tensor for each part of their weights. A shared expert of another width stays beside
them, as a dense layer. Experts that differ otherwise are computed one by one, by the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.compute.kernels.adapters import OF_EXPERTS
from headrace.compute.kernels.experts import MAX_EXPERTS, Mlp, Router
from headrace.compute.kernels.stack import Linear
from headrace.compute.kernels.triton import experts as device
from headrace.compute.kernels.triton.adapting import ChangesOfLayer
from headrace.compute.kernels.triton.quantized import Packed, Rounded, bases, gated, round_rows
from headrace.compute.kernels.triton.target import Target, power
from headrace.compute.quantization.weight import FP8, QuantizedWeight

_FEW_PAIRS, _MANY_PAIRS = 1024, 4096
"""Pairs that a program of sorting reads at once."""
_MOST_ROWS = 64
"""Rows of a tile."""
_KEYS = 64
"""Inputs of a plain weight that are read at once."""
_LEAST_SUM = 1e-20
"""Added to the sum of weights, as in `experts.route`."""


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """A linear layer of each of E experts, of one form. Parts are [E * outputs, ...], ``bias`` is [E * outputs] or
    None. ``weight`` is plain or quantized; ``keys`` as in `Packed`.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    outputs: int
    inputs: int
    keys: int

    @property
    def largest(self) -> int:
        """See `Packed.largest`."""
        return Packed(self.weight, self.keys).largest if isinstance(self.weight, QuantizedWeight) else 0


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Experts of one form, and one of another width behind them, if there is one."""

    gate_up: GroupedLinear
    down: GroupedLinear
    count: int
    beside: Mlp | None


class Parts(NamedTuple):
    """What is to be summed for each token: ``results`` [T * K, hidden] of its ``ids`` int64 [T, K] by ``weights``
    float32 [T, K]; and ``beside`` [T, hidden] of the expert with the number ``experts``. Others count for nothing.
    """

    results: Tensor
    ids: Tensor
    weights: Tensor
    experts: int
    beside: Tensor | None


def group(each: Sequence[Mlp]) -> GroupedExperts | None:
    """Experts side by side in new memory; None if they are not alike, or have no gates."""
    forms = [(_form(mlp.gate_up), _form(mlp.down)) for mlp in each]
    alike = len(each) if forms[-1] == forms[0] else len(each) - 1
    if None in forms[0] or any(form != forms[0] for form in forms[:alike]) or not alike:
        return None
    if _shape(each[0].gate_up)[0] == _shape(each[0].down)[1]:
        return None
    some = each[:alike]
    gate_up, down = _stacked([mlp.gate_up for mlp in some]), _stacked([mlp.down for mlp in some])
    return GroupedExperts(gate_up, down, alike, None if alike == len(each) else each[-1])


def _shape(linear: Linear) -> tuple[int, int]:
    """The outputs and inputs of a linear layer that the kernels take."""
    weight = linear.weight
    outputs, inputs = weight.shape if isinstance(weight, Tensor) else weight.weight.shape
    return outputs, inputs


def _form(linear: Linear) -> tuple[Any, ...] | None:
    """What linear layers of one form have in common; None: the kernels do not take this one."""
    weight = linear.weight
    if isinstance(weight, Tensor):
        return weight.dtype, tuple(weight.shape), linear.bias is None
    if not isinstance(weight, Packed) or weight.weight.order is not None:
        return None
    of = weight.weight
    marks = (of.values.dtype, of.zeros is None, of.minima is None, of.fp4, weight.keys)
    return of.bits, of.activation_bits, of.shape, of.group_size, *marks, linear.bias is None


def _stacked(linears: Sequence[Linear]) -> GroupedLinear:
    """Linear layers of one form, one behind the other."""
    first = linears[0].weight
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if isinstance(first, Tensor):
        outputs, inputs = first.shape
        whole = torch.cat([linear.weight for linear in linears])
        return GroupedLinear(whole, bias, outputs, inputs, min(_KEYS, power(inputs)))
    of: QuantizedWeight = first.weight

    def joined(name: str) -> Tensor | None:
        parts = [getattr(linear.weight.weight, name) for linear in linears]
        return None if parts[0] is None else torch.cat([part.view(_plain(part)) for part in parts])

    values, scales, zeros, minima = (joined(name) for name in ("values", "scales", "zeros", "minima"))
    assert values is not None
    assert scales is not None
    values = values.view(of.values.dtype)
    weight = QuantizedWeight(values, scales, zeros, None, of.bits, of.activation_bits, minima, of.fp4)
    return GroupedLinear(weight, bias, *of.shape, first.keys)


def _plain(part: Tensor) -> torch.dtype:
    """A type in which a part can be concatenated everywhere; fp8 cannot."""
    return torch.int8 if part.dtype == FP8 else part.dtype


def route(x: Tensor, router: Router, target: Target, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `Kernels.route`; tokens whose ``slots`` int64 [T] are below zero have no experts."""
    weight, correction, routing, bias = router
    rows, inputs = x.shape
    logits = torch.empty((rows, routing.outputs), dtype=torch.float32, device=x.device)
    ids = torch.empty((rows, routing.columns), dtype=torch.int64, device=x.device)
    weights = torch.empty((rows, routing.columns), dtype=torch.float32, device=x.device)
    if not rows:
        return ids, weights
    keys = min(128, power(inputs))
    device.logits[(-(-routing.outputs // 16), -(-rows // 16))](
        x.contiguous(),
        weight,
        logits if bias is None else bias,
        logits,
        rows,
        routing.outputs,
        inputs,
        BIAS=bias is not None,
        EVEN=inputs % keys == 0,
        ROWS=16,
        COLUMNS=16,
        KEYS=keys,
        DOT=target.dot(x.dtype if x.dtype == weight.dtype else torch.float32),
        num_warps=4,
        num_stages=3,
    )
    groups, size = routing.groups, routing.experts // routing.groups
    device.choose[(rows,)](
        logits,
        logits if correction is None else correction,
        ids if slots is None else slots,
        ids,
        weights,
        routing.outputs,
        _LEAST_SUM,
        routing.scale,
        EXPERTS=routing.experts,
        CHOSEN=routing.chosen,
        COLUMNS=routing.columns,
        SIGMOID=routing.scoring == "sigmoid",
        NORMALIZED=routing.normalized,
        CORRECTED=correction is not None,
        GROUPS=groups,
        KEPT=routing.kept_groups,
        GATED=routing.shared == "gated",
        PADDED=slots is not None,
        BLOCK_GROUPS=power(groups, 1),
        BLOCK_SIZE=power(size, 2),
        num_warps=1 if routing.experts <= 128 else 4,
    )
    return ids, weights


def prepared_router(router: Router) -> Router:
    """A router whose parts are as `route` reads them.

    Raises:
        ValueError: it has too many experts.
    """
    if router.routing.experts > MAX_EXPERTS:
        raise ValueError(f"{router.routing.experts} experts of a layer, of at most {MAX_EXPERTS}")
    weight, correction, routing, bias = router
    parts = (None if part is None else part.float().contiguous() for part in (correction, bias))
    correction, bias = parts
    return Router(weight.contiguous(), correction, routing, bias)


class _Order(NamedTuple):
    """Pairs of ``experts`` sorted by them, and the ``rows`` of a tile; if not ``sorted``, the expert of each pair."""

    order: Tensor
    begins: Tensor
    counts: Tensor
    experts: int
    tiles: int
    rows: int
    sorted: bool


def _order(ids: Tensor, experts: int) -> _Order:
    """The order of all pairs of ``ids`` int64 [T, K] among ``experts``."""
    tokens, pairs = len(ids), ids.numel()
    if tokens == 1:  # no other one has its experts
        return _Order(ids, ids, ids, experts, pairs, 16, False)
    rows = min(_MOST_ROWS, power(-(-2 * pairs // experts)))  # twice the mean: few experts have a second tile
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    begins, counts = order.new_empty((2, experts))
    block = _FEW_PAIRS if pairs <= _FEW_PAIRS else _MANY_PAIRS
    device.sort_pairs[(experts,)](
        *(ids, ids, order, begins, counts, pairs, experts, experts),
        EACH=1,
        OWNED=False,
        BLOCK=block,
        num_warps=4,
    )
    some = min(experts, pairs)  # so many tiles may not be full
    tiles = some + (pairs - some) // rows
    return _Order(order, begins, counts, experts, tiles, rows, True)


def _columns(outputs: int, tiles: int, target: Target) -> int:
    """Outputs of a program: fewer where there would be too few programs to occupy the device."""
    return 64 if -(-outputs // 64) * tiles >= target.processors else 32


def stages(shared_bytes: int, *, plain: bool) -> int:
    """Tiles of a product that are on their way at once, in so much memory for them."""
    return 4 if plain and shared_bytes > 64 << 10 else 3


def _multiply(
    x: Tensor | Rounded, linear: GroupedLinear, order: _Order, each: int, kind: int, target: Target
) -> Tensor:
    """The products of all pairs, of which ``each`` share a row of ``x``; with a ``kind``, their activation."""
    weight, quantized = linear.weight, isinstance(linear.weight, QuantizedWeight)
    of = weight if isinstance(weight, QuantizedWeight) else None
    given = (x.values if isinstance(x, Rounded) else x).contiguous()
    outputs = linear.outputs // (2 if kind >= 0 else 1)
    out = torch.empty((len(given) * each, outputs), dtype=x.dtype, device=given.device)
    plain = of.values if of is not None else weight
    keys = Packed(of, linear.keys).keys_for(x.dtype) if of is not None else linear.keys
    columns = _columns(outputs, order.tiles, target)
    dot = given.dtype if given.dtype != FP8 else torch.bfloat16
    device.grouped[(-(-outputs // columns), order.tiles)](
        given,
        order.order,
        order.begins,
        order.counts,
        plain,
        plain if of is None else of.scales,
        plain if of is None else bases(of),
        x.scales if isinstance(x, Rounded) else out,
        out if linear.bias is None else linear.bias,
        out,
        outputs,
        linear.inputs,
        0 if of is None else of.scales.shape[1],
        order.experts,
        BITS=16 if of is None else of.bits,
        FP4=of is not None and of.fp4,
        INTEGERS=isinstance(x, Rounded) and of is not None and not of.in_fp8,
        ZEROS=of is not None and of.zeros is not None,
        MINIMA=of is not None and of.minima is not None,
        GROUP=linear.inputs if of is None else of.group_size,
        EXPERTS=power(order.experts, 2),
        EACH=each,
        ROWS=order.rows,
        COLUMNS=columns,
        KEYS=keys,
        EVEN=linear.inputs % keys == 0,
        DOT=target.dot(dot),
        SORTED=order.sorted,
        KIND=kind,
        SCALED=isinstance(x, Rounded),
        BIAS=linear.bias is not None,
        num_warps=8 if quantized and order.rows == _MOST_ROWS else 4,
        num_stages=stages(target.shared_bytes, plain=not quantized),
    )
    return out


def results(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    each: GroupedExperts,
    activation: int,
    target: Target,
    add: ChangesOfLayer | None = None,
) -> Parts:
    """What the grouped experts return for each token of ``x`` [T, hidden] and its ``ids``, to be summed; ``add``
    changes their linear layers.
    """
    order, columns = _order(ids, each.count), ids.shape[1]
    first = round_rows(x, each.gate_up.largest) if each.gate_up.largest else x
    tiles = add.sorted(ids, each.count) if add is not None else None
    if add is None or tiles is None:
        inner = _multiply(first, each.gate_up, order, columns, activation, target)
    else:
        wide = _multiply(first, each.gate_up, order, columns, -1, target)
        added = gated(add.add_sorted(OF_EXPERTS[0], x, wide, tiles, columns), activation, 0)
        assert isinstance(added, Tensor), "not in bytes"
        inner = added
    second = round_rows(inner, each.down.largest) if each.down.largest else inner
    out = _multiply(second, each.down, order, 1, -1, target)
    if add is not None and tiles is not None:
        out = add.add_sorted(OF_EXPERTS[1], inner, out, tiles, 1)
    return Parts(out, ids, weights, each.count, None)
