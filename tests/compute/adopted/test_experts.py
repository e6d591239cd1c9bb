from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.compute.adopted.experts import is_experts, replace_experts
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import select
from headrace.compute.quantization.scheme import SCHEMES
from tests.compute.adopted.models import tiny

CPU = torch.device("cpu")
KERNELS, TORCH = select("auto", CPU), select("torch", CPU)


def _experts(kind: str, **fields: Any) -> Any:
    model = tiny(kind, **fields)
    return next(module for module in model.modules() if is_experts(module))


def _inputs(tokens: int, experts: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    index = torch.stack([torch.randperm(experts, generator=generator)[:3] for _ in range(tokens)])
    weights = torch.rand((tokens, 3), generator=generator)
    return 3 * torch.randn((tokens, 64), generator=generator), index, weights


@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mixtral", "granitemoe", "nemotron_h", "aria_text"])
def test_experts_compute_the_same(kind: str, tokens: int) -> None:
    """gpt_oss: interleaved, clamped and biased gates, transposed weights; nemotron_h: no gate."""
    module = _experts(kind)
    module.config._experts_implementation = "eager"
    x, index, weights = _inputs(tokens, len(module.down_proj))
    with torch.inference_mode():
        expected = module(x, index, weights)
    with torch.no_grad():
        assert replace_experts(module, KERNELS, None, "experts")
    assert module.down_proj.isnan().all()
    with torch.inference_mode():
        torch.testing.assert_close(module(x, index, weights), expected, rtol=1e-4, atol=1e-4)


def test_gates_of_another_kind_are_computed_by_the_module() -> None:
    plain, oss = _experts("qwen3_moe"), _experts("gpt_oss")
    calls = []

    def counted(*given: Any) -> torch.Tensor:
        calls.append(given[-1])
        return TORCH.experts(*given)

    kernels: Any = SimpleNamespace(
        name="counted",
        prepare_linear=TORCH.prepare_linear,
        linear=TORCH.linear,
        prepare_experts=TORCH.prepare_experts,
        experts=counted,
    )
    with torch.no_grad():
        replace_experts(oss, kernels, None, "")
        assert not calls
        replace_experts(plain, kernels, None, "")
    assert set(calls) == {"silu"}


def test_an_index_beyond_the_experts_counts_for_nothing() -> None:
    module = _experts("qwen3_moe")
    with torch.no_grad():
        replace_experts(module, KERNELS, None, "")
        x, index, weights = _inputs(4)
        index[1, 2] = index[3, 0] = 8
        weights[1, 2] = weights[3, 0] = 0
        expected = module(x, index.clamp(max=7), weights)
        torch.testing.assert_close(module(x, index, weights), expected)


def test_experts_that_do_more_stay() -> None:
    module = _experts("qwen3_moe")
    kind = type(
        "Other", (type(module),), {"forward": lambda self, *given: 2 * super(kind, self).forward(*given)}
    )
    module.__class__ = kind
    module.config._experts_implementation = "eager"
    before = module.down_proj.clone()
    with torch.no_grad():
        assert not replace_experts(module, KERNELS, None, "")
    assert torch.equal(module.down_proj, before)


def test_quantized_experts_take_a_quarter_and_odd_ones_are_named() -> None:
    module = _experts("mixtral")
    whole = module.down_proj.nbytes + module.gate_up_proj.nbytes
    with torch.no_grad():
        replace_experts(module, KERNELS, SCHEMES["int4"], "")
    parts = [
        part
        for expert in module.prepared
        for weight in (expert.first, expert.second)
        for part in weight.parts
    ]
    assert sum(part.nbytes for part in parts) < 0.25 * whole
    odd = _experts("mixtral", intermediate_size=33)
    with (
        torch.no_grad(),
        pytest.raises(ModelError, match=r"--quantization: layers\.0\.experts: 4 bits need an even"),
    ):
        replace_experts(odd, KERNELS, SCHEMES["int4"], "layers.0.experts")
