"""Whole decoder layers of another library's model in one call of the kernels, recognised by what they compute.

A layer qualifies if, in one step, it calls a norm, attention, one or two norms and a gated MLP, in the order of
`kernels.stack.Layer`; its linears and norms are those that `modules` has replaced. Then its queries, keys and values
and its result are compared with those of the layer itself, on the same states. What differs stays as it is.
Neighbours run in one call, made by the first of them.

The rotation of each step is the model's own: the layer's call receives cosines and sines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.compute.adopted.attention import Attended, Layer, heard_by, listener
from headrace.compute.adopted.decoder import PagedStep
from headrace.compute.adopted.modules import GatedMlp, Norm, Part
from headrace.compute.adopted.samples import TOLERANCES, agree
from headrace.compute.batch import Batch
from headrace.compute.kernels import Kernels, Pages
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Mlp
from headrace.compute.kernels.native_calls import NativeStack, Rotation
from headrace.compute.kernels.packed import PackedIntegers, PackedWeight
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.kernels.stack import Layer as StackLayer
from headrace.compute.kernels.stack import Linear, Stack

_TURNS = "position_embeddings"
"""The name of the argument with cosines and sines [1, T, N] of a layer."""


class _Call(NamedTuple):
    """A call of a layer: its arguments, of which so many are positional, and its result (None: not only states).

    ``identities`` are those of the states before and after it.
    """

    positional: int
    kwargs: Mapping[str, Any]
    result: Tensor | None
    identities: tuple[int, int]


class _Seen(NamedTuple):
    """A layer in one step: the modules that it called, in order, its own call, and its attention."""

    module: Any
    called: list[nn.Module]
    calls: list[_Call]
    attended: list[Attended]


class _Found(NamedTuple):
    """A layer that the kernels compute; ``turns`` are the identity of its cosines, None: it rotates nothing."""

    seen: _Seen
    attention: nn.Module
    stack: Stack
    turns: int | None


class _Watching(PagedStep):
    """A step that keeps what attention receives."""

    seen: dict[int, Attended]

    def attend(self, call: Attended) -> Tensor:
        """The next layer."""
        self.seen[id(call.module)] = call._replace(
            queries=call.queries.clone(), keys=call.keys.clone(), values=call.values.clone()
        )
        return super().attend(call)


def fuse(
    model: nn.Module,
    kernels: Kernels,
    layers: Sequence[Layer],
    batch: Batch,
    pages: Sequence[Pages],
    run: Callable[[], object],
) -> int:
    """Let one call of the kernels compute each decoder layer that allows it; returns how many do.

    Args:
        model: its modules are replaced: see `modules`.
        kernels: only those of the CPU in C++ compute a layer in one call.
        layers: the model's calls of attention, in order.
        batch: a step of several tokens in rows without earlier keys, some at the last positions.
        pages: of each layer, to write to.
        run: computes the step with the model.
    """
    if not isinstance(kernels, CppKernels):
        return 0
    found: list[_Found | None] = []
    shared = {layer.shape.shares for layer in layers}  # the model itself passes their keys and values on
    step = _Watching(kernels, layers, batch, pages, None)
    step.seen = {}
    with torch.inference_mode(), _watched(model, layers) as seen:
        with heard_by(step):
            run()
        for index, (layer, held, each) in enumerate(zip(layers, pages, seen, strict=True)):
            attended = step.seen.get(id(layer.module))
            if each is None or attended is None or index in shared or layer.shape.shares is not None:
                found.append(None)
            else:
                found.append(_found(kernels, layer, each, attended, batch, held))
        runs = list(_runs(found))
        for together in runs:
            _shadow(kernels, together)
    return sum(map(len, runs))


@contextmanager
def _watched(model: nn.Module, layers: Sequence[Layer]) -> Iterator[list[_Seen | None]]:
    """The parent of each attention module, whose calls are kept while this lasts; None: it has none of its own."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    seen: list[_Seen | None] = []
    with ExitStack() as hooks:
        for layer in layers:
            parent = parents.get(id(layer.module))
            if parent is None:
                seen.append(None)
                continue
            each = _Seen(parent, [], [], [])
            seen.append(each)
            for child in parent.children():
                hook = child.register_forward_pre_hook(lambda child, _, each=each: each.called.append(child))
                hooks.callback(hook.remove)
            hook = parent.register_forward_hook(
                lambda _, args, kwargs, result, each=each: each.calls.append(_copied(args, kwargs, result)),
                with_kwargs=True,
            )
            hooks.callback(hook.remove)
        yield seen


def _copied(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> _Call:
    """A call whose states later layers cannot change."""
    kept = {name: each.clone() if isinstance(each, Tensor) else each for name, each in kwargs.items()}
    before = args[0] if args else kwargs.get("hidden_states")
    kept["hidden_states"] = before.clone() if isinstance(before, Tensor) else None
    after = result.clone() if isinstance(result, Tensor) else None
    return _Call(len(args), kept, after, (id(before), id(result)))


def _found(
    kernels: CppKernels, layer: Layer, seen: _Seen, attended: Attended, batch: Batch, pages: Pages
) -> _Found | None:
    """The layer as a stack of one if the kernels compute the same with it."""
    if len(seen.calls) != 1 or layer.sinks or layer.value_dim != layer.shape.heads.head_dim:
        return None
    call = seen.calls[0]
    states, expected = call.kwargs["hidden_states"], call.result
    if call.positional > 1 or not isinstance(states, Tensor) or states.dim() != 3 or expected is None:
        return None
    turns = call.kwargs.get(_TURNS)
    for qk_norms, rotates in itertools.product(_head_norms(layer), (True, False)):
        stack = _stack(seen, layer, attended, states, qk_norms)
        if stack is None or (rotates and not _are_turns(turns, states)):
            continue
        rotation = _rotation(turns if rotates else None, states.shape[1])
        if not _same_heads(kernels, stack, states[0], rotation, attended, batch):
            continue
        native = kernels.prepare_layers(stack)
        if native is None:
            continue
        ours = kernels.run_layers(native, states[0], rotation, batch, (pages,))
        if _same_change(states[0], ours, expected[0]):
            return _Found(seen, layer.module, stack, None if turns is None or not rotates else id(turns[0]))
    return None


def _runs(found: Sequence[_Found | None]) -> Iterator[list[_Found]]:
    """Layers that follow each other with the same rotation and numbers, and nothing between them."""
    run: list[_Found] = []
    for each in found:
        if run and (each is None or not _follows(run[-1], each)):
            yield run
            run = []
        if each is not None:
            run.append(each)
    if run:
        yield run


def _follows(before: _Found, after: _Found) -> bool:
    alike = replace(
        after.stack, layers=(), input_norm=before.stack.input_norm, embedding=before.stack.embedding
    )
    same = replace(before.stack, layers=(), ropes=()) == replace(alike, ropes=())
    between = before.seen.calls[0].identities[1] == after.seen.calls[0].identities[0]
    return same and between and before.turns == after.turns


def _shadow(kernels: CppKernels, run: Sequence[_Found]) -> None:
    """Let one call compute layers: the first one's forward makes it, and the others pass its result on."""
    norms = [each.stack.input_norm for each in run]
    following = [*norms[1:], norms[0]]  # the norm after the last layer is not used
    layers = tuple(
        replace(each.stack.layers[0], following_norm=norm) for each, norm in zip(run, following, strict=True)
    )
    native = kernels.prepare_layers(replace(run[0].stack, layers=layers))
    assert native is not None, "each layer alone was prepared"
    attentions = [each.attention for each in run]
    first, last = _forwards(kernels, native, attentions, rotates=run[0].turns is not None)
    for place, each in enumerate(run):
        each.seen.module.forward = last if place else first


def _stack(
    seen: _Seen, layer: Layer, attended: Attended, states: Tensor, qk_norms: tuple[Norm, ...]
) -> Stack | None:
    """The layer as a stack of one, from what it called and what its modules were replaced by."""
    called = [each for each in seen.called if not isinstance(each, nn.Dropout | nn.Identity)]
    parts = [None if each is layer.module else vars(each).get("prepared") for each in called]
    kinds = "".join({Norm: "n", GatedMlp: "m", type(None): "a"}.get(type(part), "?") for part in parts)
    if kinds not in ("nanm", "nannmn") or None in (parts[0], parts[2], parts[-1]):
        return None
    heads, linears = layer.shape.heads, _linears(layer)
    norms = [part for part in parts if isinstance(part, Norm)]
    mlp = next(part for part in parts if isinstance(part, GatedMlp))
    if linears is None or len({norm.eps for norm in (*norms, *qk_norms)}) > 1:
        return None
    around = len(norms) == 4
    counts = (heads.heads, heads.kv_heads)
    spread = [norm.weight.expand(count, -1) for norm, count in zip(qk_norms, counts, strict=False)]
    one = StackLayer(
        qkv=linears[0],
        output=linears[1],
        feed=Mlp(mlp.gate_up, mlp.down),
        qk_norm=torch.cat(spread).contiguous() if spread else None,
        post_attention_norm=norms[1].weight if around else None,
        mlp_norm=norms[2 if around else 1].weight,
        post_mlp_norm=norms[3].weight if around else None,
        following_norm=norms[0].weight,  # of a result that is not used
        window=layer.shape.window,
        rope=0,
    )
    return Stack(
        embedding=states.new_empty((0, states.shape[-1])),
        embedding_scale=1.0,
        ropes=(torch.zeros((1, 2, 2)),),
        layers=(one,),
        input_norm=norms[0].weight,
        dtype=states.dtype,
        heads=heads,
        activation=mlp.activation,
        eps=norms[0].eps,
        scale=attended.scale,
        softcap=attended.softcap,
    )


def _linears(layer: Layer) -> tuple[Linear, Linear] | None:
    """The product of queries, keys and values, and that of the output, if attention has only these."""
    heads, kv_heads, size = layer.shape.heads
    parts = [part for each in layer.module.children() if isinstance(part := vars(each).get("prepared"), Part)]
    products = {id(part.product.weight): part.product for part in parts}
    held = sum(1 for each in layer.module.parameters() if each.dim() > 1)
    if len(products) != 2 or held != len(parts):
        return None
    if not all(isinstance(each.weight, PackedWeight | PackedIntegers) for each in products.values()):
        return None
    wanted = [heads * size, (heads + kv_heads) * size, (heads + 2 * kv_heads) * size]
    for first, second in itertools.permutations(products.values()):
        ends = [part.end for part in parts if part.product is first]
        if ends in (wanted, wanted[2:]) and second.weight.inputs == wanted[0]:
            return first, second
    return None


def _head_norms(layer: Layer) -> list[tuple[Norm, ...]]:
    """The norms of heads of queries and of keys that attention may have, in both orders; or none."""
    norms = [norm for each in layer.module.children() if isinstance(norm := vars(each).get("prepared"), Norm)]
    size = layer.shape.heads.head_dim
    if len(norms) != 2 or any(len(norm.weight) != size for norm in norms):
        return [()] if not norms else []
    return [(norms[0], norms[1]), (norms[1], norms[0])]


def _are_turns(turns: object, states: Tensor) -> bool:
    """Whether these are cosines and sines [1, T, N]."""
    if not isinstance(turns, tuple | list) or len(turns) != 2:
        return False
    return all(
        isinstance(each, Tensor)
        and each.dim() == 3
        and each.shape[:2] == states.shape[:2]
        and not each.shape[2] % 2
        for each in turns
    )


def _rotation(turns: tuple[Tensor, Tensor] | None, tokens: int) -> Rotation:
    """The rotation by the model's cosines and sines; by nothing without them."""
    if turns is None:
        return Rotation(torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]).expand(tokens, 2, 2))
    cos, sin = (each[0].float() for each in turns)
    signs = torch.ones(sin.shape[-1])
    signs[: len(signs) // 2] = -1
    return Rotation(torch.stack((cos, sin * signs), 1))


def _same_heads(
    kernels: Kernels, stack: Stack, states: Tensor, rotation: Rotation, attended: Attended, batch: Batch
) -> bool:
    """Whether queries, keys and values are those that the model's attention received."""
    layer, (_, kv_heads, size) = stack.layers[0], stack.heads
    if rotation.table.shape[-1] > size or stack.input_norm is None:
        return False
    qkv = kernels.linear(kernels.rms_norm(states, stack.input_norm, stack.eps), *layer.qkv)
    blocks = int(batch.block_tables.max()) + 1
    keys, values = states.new_zeros((2, blocks, batch.block_size, kv_heads, size))
    pages = Pages(keys, values)
    slots = batch.slot_mapping
    queries = TorchKernels().rope_write_kv(
        qkv, stack.heads, rotation.table, layer.qk_norm, stack.eps, slots, pages
    )
    ours = (queries, pages.keys.flatten(0, 1)[slots], pages.values.flatten(0, 1)[slots])
    theirs = (attended.queries, attended.keys, attended.values)
    return all(agree(one, other) and _same_size(one, other) for one, other in zip(ours, theirs, strict=True))


def _same_size(ours: Tensor, theirs: Tensor) -> bool:
    """Whether each token's heads are as large: a factor near 1 would be lost in the rounding of single features."""
    product = (ours.float() * theirs.float()).flatten(1).sum(1)
    square = theirs.float().square().flatten(1).sum(1)
    return bool(((product - square).abs() <= TOLERANCES[ours.dtype] / 8 * square).all())


def _same_change(states: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Whether a layer changed each token's states alike, up to the rounding of the states themselves."""
    apart = (ours.float() - theirs.float()).abs().amax(-1)
    change = (theirs.float() - states.float()).abs().amax(-1)
    rounding = torch.finfo(states.dtype).eps * theirs.float().abs().amax(-1)
    return bool((apart <= TOLERANCES[states.dtype] * change + 2 * rounding).all())


def _forwards(
    kernels: CppKernels, native: NativeStack, attentions: Sequence[nn.Module], *, rotates: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The forwards of the first and of the other layers; what depends on the step comes from the step that listens."""
    held: tuple[Pages, ...] = ()

    def step_of(thread: object) -> PagedStep:
        if not isinstance(thread, PagedStep):
            raise RuntimeError("layers outside of a step")
        return thread

    def first(hidden_states: Tensor, **arguments: Any) -> Tensor:
        nonlocal held
        step = step_of(listener())
        pages, taken = held, tuple(step.take(attention)[1] for attention in attentions)
        if len(pages) != len(taken) or any(one is not other for one, other in zip(pages, taken, strict=True)):
            held = pages = taken  # the same tuple in each step: the kernels keep its addresses
        turns = arguments[_TURNS] if rotates else None
        key = None if turns is None else id(turns[0])
        found = step.kept.get(key)
        if found is None:  # the turns are kept too, so that no others get their identity
            found = step.kept[key] = turns, _rotation(turns, hidden_states.shape[1])
        after: Tensor = kernels.run_layers(native, hidden_states[0], found[1], step.batch, pages)[None]
        step.kept[native] = after
        return after

    def passed(hidden_states: Tensor, **_: Any) -> Tensor:
        after: object = step_of(listener()).kept.get(native)
        if after is not hidden_states:
            raise RuntimeError("the states changed between two layers, unlike at start")
        return hidden_states

    return first, passed
