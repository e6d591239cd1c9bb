"""Adapters in Triton: rows of several in a step, against the definition; rows without one stay as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.compute.batch import AdapterTokens
from headrace.compute.kernels import experts
from headrace.compute.kernels.adapters import OF_EXPERTS, Change, Part, StepChanges, of_expert
from headrace.compute.kernels.experts import Mixture, Mlp, Router, Routing
from headrace.compute.kernels.stack import Linear, Stack, apply
from headrace.compute.kernels.triton import adapting
from headrace.compute.kernels.triton.adapting import DeviceAdapter
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.kernels.triton.mixtures import GroupedExperts
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE, close
from tests.compute.kernels.stacks import DECODING, HIDDEN, MIXED, PROMPTS, make, pages_for
from tests.compute.kernels.test_adapters import BATCHES, LEFT_OUT, adapter, rows_of
from tests.compute.kernels.test_experts import chosen
from tests.compute.kernels.triton.launches import Launches
from tests.compute.kernels.triton.test_experts import mlps

KERNELS = TritonKernels(CPU)


def prepared(layers: list[dict[str, Change]]) -> DeviceAdapter:
    return KERNELS.prepare_adapter(layers, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["plain", "W4A16"])
def test_rows_of_several_adapters_are_those_of_the_definition(kind: str) -> None:
    """Ranks that differ, also those of an adapter's parts; linear layers that one leaves out; rows without one."""
    ours, theirs = (make(kernels, torch.float32, kind, inner=64) for kernels in (KERNELS, ORACLE))
    one = adapter(1, torch.float32, inner=64)
    other = adapter(2, torch.float32, (18, 1, 2), LEFT_OUT, inner=64)
    written = pages_for(torch.float32), pages_for(torch.float32)
    for batch in BATCHES:
        rows = len(batch.lengths)
        actual = KERNELS.run_stack(
            ours, rows_of(batch, [prepared(one), None, prepared(other)][:rows]), written[0]
        )
        expected = apply(ORACLE, theirs, rows_of(batch, [one, None, other][:rows]), written[1])
        close(actual, expected, torch.float32, least=1e-4)


def random_change(inputs: int, sizes: list[int], ranks: list[int], dtype: torch.dtype) -> Change:
    downs = [torch.randn(rank, inputs) / inputs**0.5 for rank in ranks]
    starts = np.cumsum([0, *sizes])
    parts = [
        Part(int(at), (torch.randn(size, rank) / rank**0.5).to(dtype))
        for at, size, rank in zip(starts, sizes, ranks, strict=False)
    ]
    return Change(torch.cat(downs).to(dtype), tuple(parts))


def batch_of(each: list[Any], owners: Tensor) -> Any:
    """Tokens of which each has the adapter of its number, or none."""
    given = [AdapterTokens(one, np.flatnonzero(owners == number)) for number, one in enumerate(each)]
    tokens = torch.zeros(len(owners), dtype=torch.int32)
    return replace(DECODING, tokens=tokens, adapters=tuple(given), kept={})


@pytest.mark.usefixtures("same_sums")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [[1, 1, 1], [64, 8, 16], [100, 3, 70]])
def test_a_linear_layer_of_many_tokens(ranks: list[int], dtype: torch.dtype) -> None:
    """Several tiles of an adapter, and more outputs than a program computes."""
    torch.manual_seed(0)
    sizes, tokens, inputs = [130, 24, 24], 45, 72
    layers = [
        [{"qkv": random_change(inputs, sizes, each, dtype)}] for each in (ranks, [2, 2, 2], ranks[::-1])
    ]
    owners = torch.randint(0, 4, (tokens,))
    x, out = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, sum(sizes)).to(dtype)

    def batch(each: list[object]) -> Any:
        return batch_of(each, owners)

    changes = KERNELS.step_changes(batch([prepared(each) for each in layers]))
    actual = changes.add(0, "qkv", x, out.clone())
    defined = StepChanges(
        batch(
            [
                [{"qkv": Change(c.down.float(), tuple(Part(a, u.float()) for a, u in c.parts))}]
                for c in (e[0]["qkv"] for e in layers)
            ]
        )
    )
    close(actual, defined.add(0, "qkv", x.float(), out.float().clone()), dtype)
    assert torch.equal(actual[owners == 3], out[owners == 3])
    assert changes.add(0, "down", x, out) is out
    wanted = torch.tensor([0, 7, 44])
    changes.keep(wanted)
    some = changes.add(0, "qkv", x[wanted], out[wanted].clone())
    assert torch.equal(some, actual[wanted])
    changes.keep(torch.tensor([], dtype=torch.int64))
    assert not changes.add(0, "qkv", x[:0], out[:0]).numel()


def changes_of_experts(
    seed: int, each: list[int], hidden: int, ranks: list[int], dtype: torch.dtype, share: float = 1.0
) -> dict[str, Change]:
    """Changes of experts of these widths, of several ranks; only a ``share`` of all linear layers has one.

    The first linear layers of experts with odd numbers have one part for gates and the rest, as parameters have."""
    torch.manual_seed(seed)
    found = {}
    for number, width in enumerate(each):
        rank = ranks[number % len(ranks)]
        wide = [2 * width] if number % 2 else [width, width]
        first = random_change(hidden, wide, [rank, rank + 1][: len(wide)], dtype)
        last = random_change(width, [hidden], [rank], dtype)
        pair = zip(OF_EXPERTS, (first, last), strict=True)
        found |= {of_expert(name, number): one for name, one in pair if torch.rand(()) < share}
    return found


def wider(layer: dict[str, Change]) -> dict[str, Change]:
    return {
        name: Change(each.down.float(), tuple(Part(at, up.float()) for at, up in each.parts))
        for name, each in layer.items()
    }


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from([1, 3, 20]),
    count=st.sampled_from([2, 5]),
    columns=st.integers(1, 3),
    kind=st.sampled_from(["plain", "plain", "W4A16", "W8A8", "MXFP4"]),
    adapters=st.integers(1, 4),
    share=st.sampled_from([1.0, 0.5, 0.0]),
    few_exist=st.booleans(),
    shared=st.sampled_from([0, 64, 192]),
    activation=st.sampled_from(["silu", "clamped_swiglu"]),
    dtype=st.sampled_from(DTYPES),
)
def test_experts_of_tokens_with_adapters_are_those_of_the_definition(
    tokens: int,
    count: int,
    columns: int,
    kind: str,
    adapters: int,
    share: float,
    few_exist: bool,
    shared: int,
    activation: Any,
    dtype: torch.dtype,
) -> None:
    """Adapters that leave out experts, linear layers or all of them; tokens with none; pairs that have no expert."""
    torch.manual_seed(tokens + count)
    each = mlps(kind, count, dtype, 64, 64, biased=True, shared=shared)
    grouped = KERNELS.prepare_experts(each, dtype)
    assert isinstance(grouped, GroupedExperts)
    indices, factors = chosen(tokens, len(each), min(columns, len(each)), tokens)
    if shared:  # as a router has it: the last column is that expert
        indices[:, -1] = count
    if few_exist:
        indices[torch.rand(indices.shape) < 0.5] = count + 3
    widths = [64] * count + [shared] * bool(shared)
    layers = [
        [changes_of_experts(seed, widths, 64, [[3, 8], [17, 1]][seed % 2], dtype, share)]
        for seed in range(adapters)
    ]
    owners = torch.randint(0, adapters + 1, (tokens,))
    x = torch.randn(tokens, 64).to(dtype)
    ours = KERNELS.step_changes(batch_of([prepared(one) for one in layers], owners))
    actual = KERNELS.experts(x, indices, factors, grouped, activation, ours.of(0))
    theirs = StepChanges(batch_of([[wider(one[0])] for one in layers], owners))
    expected = defined(x, indices, factors, each, activation, theirs.of(0))
    most = expected.abs().max().clamp(min=1.0)
    coarse = kind == "W8A8" or dtype == torch.bfloat16  # the interpreter rounds bfloat16 towards zero
    close(actual / most, expected / most, dtype, least=0.05 if coarse else 1e-4)
    plain = KERNELS.experts(x, indices, factors, grouped, activation)
    without = owners == adapters
    close(actual[without], plain[without], dtype)


def defined(
    x: Tensor, indices: Tensor, factors: Tensor, each: list[Mlp], activation: Any, add: Any
) -> Tensor:
    """What the definition gives in float32, by the same weights dequantized."""

    def wide(linear: Linear) -> Linear:
        weight: Any = linear.weight if isinstance(linear.weight, Tensor) else linear.weight.weight
        assert linear.bias is not None
        return Linear(weight.float() if isinstance(weight, Tensor) else weight, linear.bias.float())

    wider = [Mlp(wide(mlp.gate_up), wide(mlp.down)) for mlp in each]
    return experts.apply(ORACLE, x.float(), indices, factors, wider, activation, add)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, 8, 24])
def test_layers_with_experts_and_adapters_are_the_same_as_by_torch(shared: int) -> None:
    """In float32: adapters of attention, of an MLP and of experts, of some of these, and rows without one."""

    def mixed(kernels: Any, stack: Stack) -> Stack:
        torch.manual_seed(5)
        each = mlps("plain", 6, torch.float32, HIDDEN, 8, biased=False, shared=shared)
        routing = Routing(6, 2, shared="gated" if shared else "none")
        router = Router(torch.randn(routing.outputs, HIDDEN), None, routing)
        feed = Mixture(kernels.prepare_router(router), kernels.prepare_experts(each, torch.float32))
        first, *middle, last = stack.layers
        return replace(stack, layers=(replace(first, feed=feed), *middle, replace(last, feed=feed)))

    ours, theirs = (mixed(kernels, make(kernels, torch.float32)) for kernels in (KERNELS, ORACLE))
    widths = [8] * 6 + [shared] * bool(shared)

    def changed(seed: int, share: float) -> list[dict[str, Change]]:
        layers = adapter(seed, torch.float32)
        for number in (0, 2):
            plain = {name: each for name, each in layers[number].items() if name not in OF_EXPERTS}
            layers[number] = plain | changes_of_experts(seed, widths, HIDDEN, [2, 16], torch.float32, share)
        return layers

    adapters = [changed(1, 1.0), changed(2, 0.4), None]
    for batch, order in ((PROMPTS, adapters), (MIXED, adapters), (DECODING, adapters[::-1])):
        rows = len(batch.lengths)
        given = [None if each is None else prepared(each) for each in order[:rows]]
        written = pages_for(torch.float32), pages_for(torch.float32)
        actual = KERNELS.run_stack(ours, rows_of(batch, given), written[0])
        expected = apply(ORACLE, theirs, rows_of(batch, order[:rows]), written[1])
        close(actual, expected, torch.float32, least=1e-4)


def test_experts_that_differ_take_adapters_one_by_one() -> None:
    each = mlps("plain", 2, torch.float32, 32, 16, biased=True, shared=48)
    each += mlps("plain", 1, torch.float32, 32, 16, biased=True, shared=0)
    assert KERNELS.prepare_experts(each, torch.float32) is each
    layer = changes_of_experts(1, [16, 16, 48, 16], 32, [3], torch.float32)
    owners = torch.tensor([0, 1, 0, 0, 1])
    x, (indices, factors) = torch.randn(5, 32), chosen(5, 4, 3, 0)
    ours = KERNELS.step_changes(batch_of([prepared([layer])], owners)).of(0)
    theirs = StepChanges(batch_of([[layer]], owners)).of(0)
    found = KERNELS.experts(x, indices, factors, each, "silu", ours)
    close(found, defined(x, indices, factors, each, "silu", theirs), torch.float32)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 90),
    count=st.integers(1, 8),
    columns=st.integers(1, 4),
    adapters=st.integers(1, 3),
    skewed=st.booleans(),
)
def test_every_pair_of_an_adapter_is_in_one_tile(
    tokens: int, count: int, columns: int, adapters: int, skewed: bool
) -> None:
    """Also where a program of sorting reads pairs several times, and where pairs have no expert."""
    drawn = np.random.default_rng(tokens + 7 * count)
    some = drawn.integers(0, count + 2, (tokens, columns))
    ids = torch.from_numpy(np.minimum(some, 1) if skewed else some)
    owners = torch.from_numpy(drawn.integers(0, adapters + 1, tokens))
    layer = changes_of_experts(0, [2] * count, 2, [1], torch.float32)
    changes: Any = KERNELS.step_changes(batch_of([prepared([layer])] * adapters, owners))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapting, "SORTED_AT_ONCE", 64)
        found = changes.sorted(0, ids, count)
    groups = (owners[:, None] * count + ids).flatten().numpy()
    groups[((owners == adapters)[:, None] | (ids >= count)).flatten().numpy()] = -1
    seen = {}
    for group, begin, end in found.tiles.view(-1, 3).tolist():
        for pair in found.order[begin : min(begin + 16, end)].tolist() if group >= 0 else ():
            assert pair not in seen
            seen[pair] = group
    assert seen == {pair: group for pair, group in enumerate(groups.tolist()) if group >= 0}


def test_an_adapter_of_experts_adds_seven_launches_to_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sort, the tiles, two for each product, and the activation behind the first one."""
    each = mlps("plain", 4, torch.float32, 32, 16, biased=False, shared=0)
    grouped = KERNELS.prepare_experts(each, torch.float32)
    x, (indices, factors) = torch.randn(5, 32), chosen(5, 4, 2, 0)
    layer = changes_of_experts(1, [16] * 4, 32, [3], torch.float32)
    changes = KERNELS.step_changes(batch_of([prepared([layer, {}])], torch.tensor([0, 1, 0, 0, 1])))
    names = []
    for add in (None, changes.of(1), changes.of(0)):
        with monkeypatch.context() as patch, Launches(patch) as launched:
            KERNELS.experts(x, indices, factors, grouped, "silu", add)
        names.append(launched.names)
    assert names[0] == names[1]  # a layer that no adapter changes
    assert len(names[2]) - len(names[0]) == 7


def test_ranks_are_even_and_begin_at_whole_words() -> None:
    change = random_change(24, [3, 5], [5, 9], torch.bfloat16)
    odd = Change(torch.cat((torch.zeros(1, 24).to(torch.bfloat16), change.down))[1:], change.parts)
    (layer,) = prepared([{"gate_up": odd}]).layers
    down, parts = layer["gate_up"]
    assert [part.up.shape[1] for part in parts] == [8, 16]
    assert all(each.data_ptr() % 16 == 0 for each in (down, *(part.up for part in parts)))
    begin = 0
    for part, before, rows in zip(parts, change.parts, change.down.split([5, 9]), strict=True):
        own = down[begin : begin + part.up.shape[1]]
        begin += len(own)
        torch.testing.assert_close(part.up.float() @ own.float(), before.up.float() @ rows.float())
