"""Routers and grouped products of experts in Triton against their definitions, for any routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.compute.kernels import Activation, experts
from headrace.compute.kernels.experts import Mixture, Mlp, OwnExperts, Router
from headrace.compute.kernels.stack import Linear, Stack, apply
from headrace.compute.kernels.triton import mixtures
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.kernels.triton.mixtures import GroupedExperts
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE, close
from tests.compute.kernels.stacks import DECODING, MIXED, PROMPTS, make, pages_for
from tests.compute.kernels.stacks import HIDDEN as STACKED
from tests.compute.kernels.test_experts import HIDDEN, ROUTINGS, chosen, random, router_for
from tests.compute.kernels.weights import quantized_weight

KERNELS = TritonKernels(CPU)
KINDS: dict[str, tuple[Literal[4, 8], Literal[8, 16], dict[str, bool]]] = {
    "W4A16": (4, 16, {"zeros": True}),
    "W4A16 with minima": (4, 16, {"minima": True}),
    "W4A8": (4, 8, {"zeros": True}),
    "W8A16": (8, 16, {}),
    "W8A16 with minima": (8, 16, {"minima": True}),
    "W8A8": (8, 8, {}),
    "fp8 W8A8": (8, 8, {"fp8": True}),
    "fp8 W8A16": (8, 16, {"fp8": True}),
    "fp4": (4, 16, {"fp4": True}),
    "MXFP4": (4, 16, {"fp4": True, "powers": True}),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_a_router_chooses_as_defined(name: str, dtype: torch.dtype, weights: torch.dtype) -> None:
    router = router_for(ROUTINGS[name], weights)
    for tokens in (1, 17):
        x = random(tokens, HIDDEN, seed=tokens).to(dtype)
        indices, factors = KERNELS.route(x, KERNELS.prepare_router(router))
        expected, theirs = experts.route(x, router)
        assert torch.equal(indices, expected)
        torch.testing.assert_close(factors, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["softmax", "groups", "shared"])
def test_padding_and_what_is_not_a_number_leave_other_tokens_as_they_are(name: str) -> None:
    router = KERNELS.prepare_router(router_for(ROUTINGS[name], torch.float32))
    x = random(4, HIDDEN, seed=1)
    whole, _ = KERNELS.route(x, router)
    x[1, 5] = torch.nan
    indices, factors = KERNELS.route(x, router, torch.tensor([3, 0, -1, 9]))
    assert torch.equal(indices[::3], whole[::3])
    assert factors[::3].isfinite().all()
    assert ((indices[1] >= 0) & (indices[1] <= ROUTINGS[name].experts)).all()
    assert len(set(indices[1].tolist())) == indices.shape[1]
    assert (indices[2] > ROUTINGS[name].experts).all()  # beyond a shared expert, too
    none = KERNELS.route(x[:0], router)
    assert [len(each) for each in none] == [0, 0]


def mlps(
    kind: str, count: int, dtype: torch.dtype, hidden: int, width: int, *, biased: bool, shared: int
) -> list[Mlp]:
    """Random experts ``width`` elements wide, and one of ``shared`` elements behind them."""

    def linear(outputs: int, inputs: int) -> Linear:
        bias = torch.randn(outputs).to(dtype) if biased else None
        if kind == "plain":
            return Linear((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), bias)
        bits, activation_bits, marks = KINDS[kind]
        groups = 1 if kind in ("W8A8", "fp8 W8A8") else inputs // 32 if kind == "MXFP4" else inputs // 64
        weight = quantized_weight(outputs, inputs, groups, bits, activation_bits, **marks)
        return Linear(KERNELS.prepare_linear(weight), bias)

    widths = [width] * count + ([shared] if shared else [])
    return [Mlp(linear(2 * each, hidden), linear(hidden, each)) for each in widths]


def routed(tokens: int, count: int, columns: int, way: str) -> tuple[Tensor, Tensor]:
    """Experts of tokens, in any order: as they come, the same of all tokens, or many that do not exist."""
    indices, factors = chosen(tokens, count, columns, tokens + columns)
    if way == "all to a few":
        indices = indices[:1].expand(tokens, -1).contiguous()
    if way == "few exist":
        indices = torch.where(torch.rand(indices.shape) < 0.7, count + 3, indices)
    return indices, factors


def exact(x: Tensor, indices: Tensor, factors: Tensor, each: list[Mlp], activation: Activation) -> Tensor:
    """What the definition gives in float32, by the same weights dequantized."""

    def wide(linear: Linear) -> Linear:
        weight: Any = linear.weight if isinstance(linear.weight, Tensor) else linear.weight.weight
        bias = None if linear.bias is None else linear.bias.float()
        return Linear(weight.float() if isinstance(weight, Tensor) else weight, bias)

    wider = [Mlp(wide(mlp.gate_up), wide(mlp.down)) for mlp in each]
    return experts.apply(ORACLE, x.float(), indices, factors, wider, activation)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    tokens=st.sampled_from([1, 1, 2, 5, 23, 90]),
    count=st.sampled_from([2, 5, 12]),
    columns=st.integers(1, 4),
    kind=st.sampled_from(["plain", *KINDS]),
    way=st.sampled_from(["any", "all to a few", "few exist"]),
    biased=st.booleans(),
    shared=st.sampled_from([0, 64, 192]),
    activation=st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]),
    dtype=st.sampled_from(DTYPES),
)
def test_experts(
    tokens: int,
    count: int,
    columns: int,
    kind: str,
    way: str,
    biased: bool,
    shared: int,
    activation: Activation,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(tokens + count)
    each = mlps(kind, count, dtype, 128, 64, biased=biased, shared=shared)
    grouped = KERNELS.prepare_experts(each, dtype)
    assert isinstance(grouped, GroupedExperts)
    assert (grouped.beside is not None) == (shared == 192)
    indices, factors = routed(tokens, len(each), min(columns, len(each)), way)
    x = torch.randn(tokens, 128).to(dtype)
    ours = KERNELS.experts(x, indices, factors, grouped, activation)
    assert ours.dtype == dtype
    in_bytes = 0.02 if kind.endswith("A8") else 0.0  # rounding of activations is not continuous
    close(ours, exact(x, indices, factors, each, activation), dtype, least=in_bytes)


@pytest.mark.parametrize(("hidden", "width"), [(48, 40), (24, 16), (96, 200)])
def test_plain_experts_of_odd_sizes(hidden: int, width: int) -> None:
    """Inputs that no step of the kernel divides."""
    torch.manual_seed(0)
    each = mlps("plain", 5, torch.float32, hidden, width, biased=True, shared=8)
    grouped = KERNELS.prepare_experts(each, torch.float32)
    for tokens in (1, 6, 40):
        indices, factors = chosen(tokens, len(each), 3, tokens)
        x = torch.randn(tokens, hidden)
        ours = KERNELS.experts(x, indices, factors, grouped, "silu")
        close(ours, exact(x, indices, factors, each, "silu"), torch.float32)


def test_no_tokens_have_no_experts() -> None:
    grouped = KERNELS.prepare_experts(
        mlps("plain", 3, torch.float32, 32, 16, biased=False, shared=0), torch.float32
    )
    none = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    assert KERNELS.experts(torch.empty(0, 32), *none, grouped, "silu").shape == (0, 32)


def test_experts_without_gates_are_computed_one_by_one() -> None:
    wide, narrow = random(24, HIDDEN, seed=1) / 8, random(HIDDEN, 24, seed=2) / 8
    each = [Mlp(Linear(KERNELS.prepare_linear(wide), None), Linear(KERNELS.prepare_linear(narrow), None))] * 3
    prepared = KERNELS.prepare_experts(each, torch.float32)
    assert prepared is each
    x, (indices, factors) = random(5, HIDDEN, seed=3), chosen(5, 3, 2, 1)
    out = KERNELS.experts(x, indices, factors, prepared, "squared_relu")
    inner = (x @ wide.T).relu().square() @ narrow.T
    close(out, inner * factors.sum(1, keepdim=True), torch.float32)


def test_experts_that_differ_are_computed_one_by_one() -> None:
    each = mlps("plain", 2, torch.float32, 32, 16, biased=False, shared=48)
    each += mlps("plain", 1, torch.float32, 32, 16, biased=True, shared=0)
    assert KERNELS.prepare_experts(each, torch.float32) is each
    ordered = [
        Mlp(*(Linear(KERNELS.prepare_linear(quantized_weight(64, 64, 1, 4, 16, order=True)), None),) * 2)
    ]
    assert KERNELS.prepare_experts(ordered, torch.float32) is ordered
    indices, factors = chosen(4, 4, 2, 0)
    x = torch.randn(4, 32)
    close(
        KERNELS.experts(x, indices, factors, each, "silu"),
        exact(x, indices, factors, each, "silu"),
        torch.float32,
    )
    loads = OwnExperts(0, 4, 4, torch.zeros(4, dtype=torch.int64))
    grouped = KERNELS.prepare_experts(each[:2], torch.float32)
    waits = [
        Mixture(None, experts, own).waits
        for experts, own in ((each, None), (grouped, None), (grouped, loads))
    ]
    assert waits == [True, False, True]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tokens=st.integers(2, 300), count=st.integers(1, 40), columns=st.integers(1, 6), skewed=st.booleans())
def test_every_pair_has_one_tile_of_its_expert(tokens: int, count: int, columns: int, skewed: bool) -> None:
    """Also where a program of sorting reads pairs several times."""
    drawn = np.random.default_rng(tokens + 7 * count)
    some = drawn.integers(0, count + 2, (tokens, columns))
    ids = torch.from_numpy(np.minimum(some, 1) if skewed else some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtures, "_FEW_PAIRS", 64)
        patch.setattr(mixtures, "_MANY_PAIRS", 256)
        found = mixtures._order(ids, count)
    flat = ids.flatten()
    existing = flat < count
    expected = flat.argsort(stable=True)[: int(existing.sum())]
    assert torch.equal(found.order[: len(expected)].long(), expected)
    counts = flat[existing].bincount(minlength=count)
    assert torch.equal(found.counts.long(), counts)
    assert torch.equal(found.begins.long(), counts.cumsum(0) - counts)
    assert int((-(-counts // found.rows)).sum()) <= found.tiles <= flat.numel()


@pytest.mark.usefixtures("same_sums")
def test_a_token_is_the_same_bit_for_bit_beside_others() -> None:
    torch.manual_seed(0)
    each = mlps("plain", 8, torch.float32, 64, 32, biased=False, shared=0)
    grouped = KERNELS.prepare_experts(each, torch.float32)
    x, (indices, factors) = torch.randn(9, 64), chosen(9, 8, 2, 0)
    together = KERNELS.experts(x, indices, factors, grouped, "silu")
    for token in (0, 8):
        one = slice(token, token + 1)
        assert torch.equal(
            KERNELS.experts(x[one], indices[one], factors[one], grouped, "silu"), together[one]
        )


@pytest.mark.parametrize("shared", [0, 8, 24])
@pytest.mark.parametrize("rich", [False, True])
def test_layers_with_experts_are_the_same_as_by_torch(rich: bool, shared: int) -> None:
    """With norms behind the experts and without, a shared one, and tokens that are padding."""

    def mixed(kernels: Any, stack: Stack) -> Stack:
        torch.manual_seed(5)
        each = mlps("plain", 6, torch.float32, STACKED, 8, biased=rich, shared=shared)
        routing = replace_routing(shared)
        router = Router(torch.randn(routing.outputs, STACKED), None, routing)
        feed = Mixture(kernels.prepare_router(router), kernels.prepare_experts(each, torch.float32))
        first, *middle, last = stack.layers
        return replace(stack, layers=(replace(first, feed=feed), *middle, replace(last, feed=feed)))

    ours, theirs = (mixed(kernels, make(kernels, torch.float32, rich=rich)) for kernels in (KERNELS, ORACLE))
    written = pages_for(torch.float32), pages_for(torch.float32)
    for batch in (PROMPTS, MIXED, DECODING):
        actual = KERNELS.run_stack(KERNELS.prepare_stack(ours), batch, written[0])
        close(actual, apply(ORACLE, theirs, batch, written[1]), torch.float32, least=1e-4)
    padded = replace(DECODING, slot_mapping=torch.tensor([DECODING.slot_mapping[0].item(), -1]))
    ours_, theirs_ = (
        kernels.run_stack(stack, padded, pages_for(torch.float32))
        for kernels, stack in ((KERNELS, ours), (KERNELS, theirs))
    )
    assert ours_[0].isfinite().all()
    close(ours_[:1], theirs_[:1], torch.float32, least=1e-4)


def replace_routing(shared: int) -> experts.Routing:
    return experts.Routing(6, 2, shared="gated" if shared else "none")
