"""Routers and experts of each backend choose and compute what their definitions in torch do."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from headrace.compute.kernels import Activation, KernelsUnavailable, experts
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Mlp, Router, Routing
from headrace.compute.kernels.native_experts import NativeExperts
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.kernels.stack import Linear
from tests.compute.kernels.weights import quantized_weight

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

HIDDEN = 48
EXPERTS = 12
ROUTINGS = {
    "softmax": Routing(EXPERTS, 3, normalized=False),
    "softmax of the chosen": Routing(EXPERTS, 3),
    "all": Routing(EXPERTS, EXPERTS, scale=2.0),
    "one": Routing(1, 1, normalized=False, shared="plain"),
    "sigmoid": Routing(EXPERTS, 4, "sigmoid", scale=2.5),
    "groups": Routing(EXPERTS, 4, "sigmoid", groups=4, kept_groups=2),
    "groups of one": Routing(EXPERTS, 2, groups=12, kept_groups=3, normalized=False),
    "shared": Routing(EXPERTS, 2, shared="plain"),
    "shared with a gate": Routing(EXPERTS, 2, normalized=False, shared="gated"),
    "as many as there may be": Routing(
        experts.MAX_EXPERTS, 8, "sigmoid", groups=8, kept_groups=2, shared="gated"
    ),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router_for(routing: Routing, dtype: torch.dtype) -> Router:
    weight = random(routing.outputs, HIDDEN, seed=3).to(dtype) / 4
    correction = random(routing.experts, seed=4) / 4 if routing.scoring == "sigmoid" else None
    bias = random(routing.outputs, seed=5) / 2 if routing.normalized else None
    return Router(weight, correction, routing, bias)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_a_router_chooses_as_defined(level: str, name: str, dtype: torch.dtype, weights: torch.dtype) -> None:
    router = router_for(ROUTINGS[name], weights)
    kernels = CppKernels(level)
    prepared = kernels.prepare_router(router)
    for tokens in (1, 5, 40):
        x = random(tokens, HIDDEN, seed=tokens).to(dtype)
        indices, factors = kernels.route(x, prepared)
        expected, theirs = experts.route(x, router)
        assert torch.equal(indices, expected)
        torch.testing.assert_close(factors, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ROUTINGS)
def test_what_is_not_a_number_is_chosen_and_stays_one_token_s_own(name: str) -> None:
    kernels, routing = CppKernels(), ROUTINGS[name]
    router = router_for(routing, torch.float32)
    x = random(3, HIDDEN, seed=1)
    whole, _ = kernels.route(x, kernels.prepare_router(router))
    x[1, 5] = torch.nan
    indices, factors = kernels.route(x, kernels.prepare_router(router))
    assert torch.equal(indices[::2], whole[::2])
    assert factors[1].isnan().any()
    assert factors[::2].isfinite().all()
    router.weight[routing.experts - 1] = torch.nan  # of one expert
    for found, expected in zip(
        kernels.route(x, kernels.prepare_router(router)), experts.route(x, router), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6, equal_nan=True)


def test_no_tokens_have_no_experts() -> None:
    """A step that ends no prompt computes no token behind the last layer's attention."""
    for kernels in (TorchKernels(), *map(CppKernels, LEVELS)):
        for routing in ROUTINGS.values():
            router = kernels.prepare_router(router_for(routing, torch.float32))  # type: ignore[arg-type]
            indices, factors = kernels.route(random(0, HIDDEN), router)  # type: ignore[arg-type]
            assert indices.shape == factors.shape == (0, routing.columns)
        prepared = kernels.prepare_experts(mlps(kernels, 3, torch.float32, "plain"), torch.float32)
        none = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
        out = kernels.experts(random(0, HIDDEN), *none, prepared, "silu")  # type: ignore[arg-type]
        assert out.shape == (0, HIDDEN)


def mlps(
    kernels: Any,
    count: int,
    dtype: torch.dtype,
    kind: str,
    *,
    biased: bool = False,
    gated: bool = True,
    shared: int = 0,
    hidden: int = HIDDEN,
    width: int = 40,
) -> list[Mlp]:
    """Experts ``width`` elements wide, and one of ``shared`` elements behind them."""
    bits: dict[str, tuple[Literal[4, 8], Literal[8, 16]]] = {"W8A8": (8, 8), "W4A8": (4, 8), "W4A16": (4, 16)}
    bits |= dict.fromkeys(("fp4", "mxfp4"), bits["W4A16"])

    def linear(outputs: int, inputs: int, seed: int) -> Linear:
        if kind in bits:
            # `torch.manual_seed` also formats the stack, for a GPU that may come: half a millisecond a layer.
            torch.default_generator.manual_seed(seed)
            marks = {"zeros": kind == "W4A16", "fp4": kind.endswith("fp4"), "powers": kind == "mxfp4"}
            groups = inputs // 32 if kind == "mxfp4" else 1
            weight: Any = quantized_weight(outputs, inputs, groups, *bits[kind], **marks)
        else:
            weight = (random(outputs, inputs, seed=seed) / inputs**0.5).to(dtype)
        bias = random(outputs, seed=seed + 1).to(dtype) if biased else None
        return Linear(kernels.prepare_linear(weight), bias)

    widths = [width] * count + ([shared] if shared else [])
    return [
        Mlp(linear((1 + gated) * each, hidden, 10 * place), linear(hidden, each, 10 * place + 5))
        for place, each in enumerate(widths)
    ]


def chosen(tokens: int, count: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(count, generator=generator)[:columns] for _ in range(tokens)])
    return indices, torch.rand(tokens, columns, generator=generator)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W8A8", "W4A8", "W4A16", "fp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_as_their_linear_layers_one_by_one(level: str, kind: str, dtype: torch.dtype) -> None:
    kernels = CppKernels(level)
    hidden, width, second = (64, 96, 160) if kind == "mxfp4" else (HIDDEN, 40, 72)
    cases: list[tuple[bool, int, Activation]] = [(False, 0, "silu"), (True, second, "clamped_swiglu")]
    for biased, shared, activation in (*cases, (True, second, "squared_relu")):
        sizes, gated = {"shared": shared, "hidden": hidden, "width": width}, activation != "squared_relu"
        each = mlps(kernels, 6, dtype, kind, biased=biased, gated=gated, **sizes)
        prepared = kernels.prepare_experts(each, dtype)
        assert isinstance(prepared, NativeExperts)
        for tokens in (1, 7, 33):
            x = random(tokens, hidden, seed=tokens).to(dtype)
            indices, factors = chosen(tokens, len(each), 3, tokens)
            ours = kernels.experts(x, indices, factors, prepared, activation)
            theirs = experts.apply(kernels, x, indices, factors, each, activation)
            torch.testing.assert_close(
                ours, theirs, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
            )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kinds", [("plain", "W4A16", "W8A8", "fp4"), ("W8A8", "W4A8"), ("W4A8", "W8A8")])
def test_experts_of_several_forms_compute_as_their_linear_layers(level: str, kinds: tuple[str, ...]) -> None:
    """Rows take the integers of their token only where they are those of the expert's form."""
    kernels = CppKernels(level)
    each = [one for kind in kinds for one in mlps(kernels, 2, torch.bfloat16, kind)]
    prepared = kernels.prepare_experts(each, torch.bfloat16)
    assert isinstance(prepared, NativeExperts)
    for tokens in (1, 9, 40):
        x = random(tokens, HIDDEN, seed=tokens).bfloat16()
        indices, factors = chosen(tokens, len(each), len(each) // 2, tokens)
        ours = kernels.experts(x, indices, factors, prepared, "silu")
        theirs = experts.apply(kernels, x, indices, factors, each, "silu")
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["plain", "W8A8"])
def test_waves_of_many_rows_give_what_few_do(level: str, kind: str) -> None:
    """Rows that one expert or several cannot hold at once are computed in waves; a token's result stays the same."""
    kernels = CppKernels(level)
    each = mlps(kernels, 5, torch.bfloat16, kind, shared=24)
    prepared = kernels.prepare_experts(each, torch.bfloat16)
    x = random(1500, HIDDEN, seed=1).bfloat16()
    indices, factors = chosen(1500, len(each), 3, 1)
    indices[:, 0] = torch.where(
        (indices == 0).any(1), indices[:, 0], 0
    )  # nearly all tokens have the first expert
    together = kernels.experts(x, indices, factors, prepared, "silu")
    for token in (0, 700, 1499):
        one = slice(token, token + 1)
        alone = kernels.experts(x[one], indices[one], factors[one], prepared, "silu")
        assert torch.equal(alone, together[one])


def test_what_is_not_a_number_stays_so_without_gates() -> None:
    kernels = CppKernels()
    each = mlps(kernels, 2, torch.float32, "plain", gated=False)
    x, indices, factors = random(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    x[1, 3] = torch.nan
    out = kernels.experts(x, indices, factors, kernels.prepare_experts(each, torch.float32), "squared_relu")
    assert out[1].isnan().all()
    assert out[::2].isfinite().all()


def test_an_expert_beyond_the_last_counts_for_nothing() -> None:
    kernels = CppKernels()
    each = mlps(kernels, 4, torch.float32, "plain")
    prepared = kernels.prepare_experts(each, torch.float32)
    x, indices, factors = random(3, HIDDEN), torch.tensor([[4, 1], [4, 4], [2, 0]]), torch.ones(3, 2)
    ours = kernels.experts(x, indices, factors, prepared, "silu")
    torch.testing.assert_close(ours, experts.apply(kernels, x, indices, factors, each, "silu"))
    assert not ours[1].any()
    with pytest.raises(IndexError, match="-1"):
        kernels.experts(x, indices - 5, factors, prepared, "silu")


def test_the_load_of_experts_is_counted() -> None:
    kernels = CppKernels()
    prepared = kernels.prepare_experts(mlps(kernels, 4, torch.float32, "plain"), torch.float32)
    assert isinstance(prepared, NativeExperts)
    indices = torch.tensor([[0, 1], [0, 2], [0, 1]])
    for _ in range(2):
        kernels.experts(random(3, HIDDEN), indices, torch.ones(3, 2), prepared, "silu")
    assert prepared.loads.tolist() == [6, 4, 2, 0]


def test_experts_that_do_not_fit_are_refused() -> None:
    kernels = CppKernels()
    each = mlps(kernels, 2, torch.float32, "plain")
    prepared = kernels.prepare_experts(each, torch.float32)
    x, indices, factors = random(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    for wrong in (x[:1], x[:, :40], x.bfloat16()):
        with pytest.raises(ValueError, match="for experts of 48"):
            kernels.experts(wrong, indices, factors, prepared, "silu")
    with pytest.raises(ValueError, match="for experts of 48"):
        kernels.experts(x, indices.int(), factors, prepared, "silu")
    with pytest.raises(ValueError, match="squared_relu of experts with gates"):
        kernels.experts(x, indices, factors, prepared, "squared_relu")
    plain = kernels.prepare_experts(mlps(kernels, 2, torch.float32, "plain", gated=False), torch.float32)
    with pytest.raises(ValueError, match="silu of experts without gates"):
        kernels.experts(x, indices, factors, plain, "silu")
    with pytest.raises(ValueError, match="a linear layer"):
        kernels.prepare_experts([Mlp(each[0].down, each[0].gate_up)], torch.float32)
    for routing in (Routing(4, 5), Routing(2000, 1), Routing(9, 2, groups=4), Routing(8, 4, groups=4)):
        with pytest.raises(ValueError, match="cannot be chosen so"):
            kernels.prepare_router(Router(random(routing.outputs, HIDDEN), None, routing))


def test_experts_whose_weights_are_not_packed_are_computed_one_by_one() -> None:
    kernels, plain = CppKernels(), TorchKernels()
    each = mlps(plain, 3, torch.float16, "plain")
    assert kernels.prepare_experts(each, torch.float16) is each
    x, (indices, factors) = random(4, HIDDEN).half(), chosen(4, 3, 2, 0)
    ours = kernels.experts(x, indices, factors, each, "silu")
    torch.testing.assert_close(ours, plain.experts(x, indices, factors, each, "silu"), rtol=1e-2, atol=1e-3)
