import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headrace.compute.adopted.modules import GatedMlp, Norm, held_bytes, replace
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import select
from headrace.compute.quantization.scheme import SCHEMES, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight
from tests.compute.adopted.models import logits, tiny

CPU = torch.device("cpu")
KERNELS = select("auto", CPU)

COUNTS = {
    "llama": {"linear layers": 9, "gated MLPs": 2, "norms": 5},
    "gemma": {"linear layers": 9, "gated MLPs": 2, "norms": 5},
    "gemma3_text": {"linear layers": 9, "gated MLPs": 2, "norms": 13},
    "olmo2": {"linear layers": 9, "gated MLPs": 2, "norms": 9},
    "granite": {"linear layers": 9, "gated MLPs": 2, "norms": 5},
    "phi3": {"linear layers": 5, "gated MLPs": 2, "norms": 5},
    "glm4": {"linear layers": 9, "gated MLPs": 2, "norms": 9},
    "phi": {"linear layers": 13},
    "starcoder2": {"linear layers": 13},
    "gpt2": {"linear layers": 9},
    "bloom": {"linear layers": 5},
    "qwen3_moe": {"linear layers": 9, "experts": 2, "norms": 9},
    "gpt_oss": {"linear layers": 9, "experts": 2, "norms": 5},
    "mixtral": {"linear layers": 9, "experts": 2, "norms": 5},
}


@pytest.mark.parametrize("kind", COUNTS)
def test_a_model_computes_the_same_with_replaced_modules(kind: str) -> None:
    model = tiny(kind, decoder_sparse_step=1) if kind == "qwen3_moe" else tiny(kind)
    expected = logits(model)
    counts = replace(model, KERNELS)
    assert dict(counts) == COUNTS[kind]
    assert float((logits(model) - expected).abs().max()) < 2e-5 * float(expected.abs().max()) + 2e-5


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen3_moe"])
def test_it_computes_the_same_in_bfloat16(kind: str) -> None:
    model = tiny(kind, torch.bfloat16)
    expected = logits(model)
    replace(model, KERNELS)
    apart = (logits(model) - expected).abs().amax(-1) / expected.std()
    assert float(apart.median()) < 0.15


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_recognised_by_its_values(offset: float, late: bool, dtype: torch.dtype) -> None:
    class AnyName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(-8, 24).to(dtype) / 16)
            self.other, self.small = 1e-6, 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.small)
            if late:
                return ((offset + self.weight.float()) * wide).to(x.dtype)
            return (offset + self.weight) * wide.to(x.dtype)

    module = AnyName()
    assert replace(module, KERNELS) == {"norms": 1}
    norm: Norm = module.prepared  # type: ignore[assignment]
    assert norm.eps == 1e-5
    assert torch.equal(norm.weight, module.weight.float() + offset)


def test_other_norms_stay() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            y = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            return y if gate is None else y * gate

    for module in (nn.LayerNorm(32), Mean(), Gated()):
        assert not replace(module, KERNELS)


class _Mlp(nn.Module):
    def __init__(self, act: nn.Module, *, swapped: bool, bias: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 48, bias=bias), nn.Linear(32, 48, bias=False)
        self.c, self.act, self.swapped = nn.Linear(48, 32, bias=bias), act, swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        return self.c(self.act(b) * a if self.swapped else self.act(a) * b)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh")])
def test_a_gated_mlp_is_recognised_by_its_values(act: nn.Module, swapped: bool, bias: bool) -> None:
    mlp, x = _Mlp(act, swapped=swapped, bias=bias), torch.randn(2, 5, 32)
    expected = mlp(x)
    assert replace(mlp, KERNELS) == {"gated MLPs": 1}
    assert mlp.prepared.activation == ("silu" if isinstance(act, nn.SiLU) else "gelu_tanh")
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)


def test_an_mlp_with_another_activation_keeps_it() -> None:
    for act in (nn.GELU(), nn.ReLU(), nn.Mish()):
        mlp, x = _Mlp(act, swapped=False, bias=True), torch.randn(3, 32)
        expected = mlp(x)
        assert replace(mlp, KERNELS) == {"linear layers": 3}
        torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)


def test_a_clamped_mlp_is_no_gated_mlp() -> None:
    class Clamped(_Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(F.silu(self.a(x).clamp(max=7)) * self.b(x).clamp(-7, 7))

    assert replace(Clamped(nn.SiLU(), swapped=False, bias=False), KERNELS) == {"linear layers": 3}


@pytest.mark.parametrize("gate_first", [True, False])
def test_a_merged_projection_of_gate_and_factor(gate_first: bool) -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(32, 96), nn.Linear(48, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = self.both(x).chunk(2, -1)
            return self.down(F.silu(one) * other if gate_first else F.silu(other) * one)

    mlp, x = Merged(), torch.randn(3, 32)
    expected = mlp(x)
    assert replace(mlp, KERNELS) == {"gated MLPs": 1}
    assert isinstance(mlp.prepared, GatedMlp)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 16, bias=False)
        self.v_proj = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(y), self.v_proj(x), self.q_proj(y)], -1)


def test_projections_of_one_input_are_one_product_and_right_for_others() -> None:
    module, x, y = _Attention(), torch.randn(1, 4, 32), torch.randn(1, 4, 32)
    expected = module(x, x), module(x, y)
    assert replace(module, KERNELS) == {"linear layers": 3}
    assert module.q_proj.prepared.product is module.v_proj.prepared.product
    torch.testing.assert_close(module(x, x), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module(x, y), expected[1], rtol=1e-4, atol=1e-5)


def test_a_linear_that_does_more_or_whose_weight_is_read_stays() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-1, 1)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x.to(self.other.weight.dtype)) @ self.inner.weight

    assert not replace(Clipped(8, 8), KERNELS)
    module, x = Reading(), torch.randn(2, 8)
    expected = module(x)
    assert replace(module, KERNELS) == {"linear layers": 1}
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_originals_are_freed_and_read_as_nan() -> None:
    linear = nn.Linear(256, 256)
    address = weakref.ref(linear.weight.untyped_storage())
    whole = linear.weight.nbytes
    replace(linear, KERNELS)
    gc.collect()
    assert address() is None
    assert linear.weight.shape == (256, 256)
    assert linear.weight.isnan().all()
    assert linear.weight.untyped_storage().nbytes() == 4
    assert whole <= held_bytes(linear) < 2.1 * whole


def test_one_layer_is_held_twice_at_most() -> None:
    """At each product that is packed, the originals of all modules before it are gone."""
    model = tiny("llama", num_hidden_layers=4)
    total = held_bytes(model)
    layer = held_bytes(model.model.layers[0])
    most = 0
    packed: list[int] = []
    plain = select("torch", CPU)

    def prepare(weight: torch.Tensor) -> torch.Tensor:
        nonlocal most
        packed.append(weight.nbytes)
        most = max(most, held_bytes(model) + weight.nbytes)
        return weight.clone()

    counting = SimpleNamespace(
        name="counting",
        fp8=False,
        prepare_linear=prepare,
        linear=lambda x, weight, bias=None: F.linear(x, weight, bias),
        rms_norm=plain.rms_norm,
        gated_activation=plain.gated_activation,
    )
    replace(model, counting)  # type: ignore[arg-type]
    assert len(packed) == 4 * 4 + 1
    assert most <= 1.1 * total + layer


def test_a_wrong_product_is_refused() -> None:
    wrong = SimpleNamespace(
        name="wrong",
        fp8=False,
        prepare_linear=lambda w: w,
        linear=lambda x, w, bias=None: F.linear(x, w + 1, bias),
    )
    with pytest.raises(ModelError, match=r"'wrong' give another result than Linear at model\.head"):
        replace(nn.Linear(8, 8), wrong, name="model.head")  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["int8", "int4", "w4a8"])
@pytest.mark.parametrize("kind", ["llama", "olmo2", "gpt2", "gpt_oss", "qwen3_moe"])
def test_quantized_equals_the_model_with_dequantized_weights(kind: str, scheme: str) -> None:
    model, plain = tiny(kind), tiny(kind)
    with torch.no_grad():
        for module in plain.base_model.modules():
            _dequantize(module, scheme)
    expected = logits(plain)
    replace(model.base_model, KERNELS, scheme=SCHEMES[scheme])
    apart = (logits(model) - expected).abs().amax(-1) / expected.std()
    if SCHEMES[scheme].activation_bits == 16:
        assert float(apart.max()) < 1e-3
    else:
        assert float(apart.median()) < 0.3


def _dequantize(module: nn.Module, scheme: str) -> None:
    names = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
    for name in names:
        child = getattr(module, name)
        child.weight = nn.Parameter(round_to_nearest(child.weight, SCHEMES[scheme]).dequantized())
    if hasattr(module, "nf"):
        module.weight.copy_(round_to_nearest(module.weight.T.contiguous(), SCHEMES[scheme]).dequantized().T)
    if hasattr(module, "has_gate"):
        for weights in (module.gate_up_proj, module.down_proj):
            for weight in weights:
                each = weight.T if module.is_transposed else weight
                each.copy_(round_to_nearest(each.contiguous(), SCHEMES[scheme]).dequantized())


def test_int4_is_exactly_the_dequantized_product() -> None:
    linear, x = nn.Linear(128, 64), torch.randn(5, 128)
    weight = round_to_nearest(linear.weight.detach(), SCHEMES["int4"])
    replace(linear, KERNELS, scheme=SCHEMES["int4"])
    torch.testing.assert_close(
        linear(x), F.linear(x, weight.dequantized(), linear.bias), rtol=1e-4, atol=1e-4
    )


def test_a_router_beside_experts_is_not_quantized() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 4)
            self.experts = nn.ModuleList(_Mlp(nn.SiLU(), swapped=False, bias=False) for _ in range(4))

    block, x = Block(), torch.randn(3, 32)
    expected = block.gate(x)
    assert replace(block, KERNELS, scheme=SCHEMES["int4"]) == {"gated MLPs": 4, "linear layers": 1}
    torch.testing.assert_close(block.gate(x), expected, rtol=1e-4, atol=1e-5)


def test_a_width_that_cannot_be_quantized_is_named() -> None:
    with pytest.raises(ModelError, match=r"--quantization: model\.odd: 4 bits need an even number"):
        replace(nn.Linear(33, 8), KERNELS, scheme=SCHEMES["int4"], name="model.odd")


def _stored(model: nn.Module, scheme: str) -> dict[str, QuantizedWeight]:
    """Quantize the linears of layers, and leave them on the meta device."""
    stored = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in path:
            stored[path] = round_to_nearest(module.weight.detach(), SCHEMES[scheme])
            module.weight = nn.Parameter(module.weight.detach().to("meta"))
    return stored


@pytest.mark.parametrize("kind", ["llama", "olmo2", "starcoder2"])
def test_stored_quantized_weights_are_computed_as_stored(kind: str) -> None:
    model, plain = tiny(kind), tiny(kind)
    stored = _stored(model, "int4")
    for path, weight in stored.items():
        plain.get_submodule(path).weight = nn.Parameter(weight.dequantized())
    replace(model, KERNELS, stored=stored)
    expected = logits(plain)
    assert float((logits(model) - expected).abs().max() / expected.std()) < 1e-3
    smaller = held_bytes(model.model.layers[0]) / held_bytes(plain.model.layers[0])
    assert smaller < 0.3


def test_stored_weights_that_do_not_fit_are_named() -> None:
    model = tiny("llama")
    stored = _stored(model, "int8")
    with pytest.raises(ModelError, match="already quantized; omit this option"):
        replace(model, KERNELS, stored=stored, scheme=SCHEMES["int8"])
    with pytest.raises(ModelError, match=r"at\.all is stored quantized as \[8, 8\], it is no linear layer"):
        replace(model, KERNELS, stored={"at.all": round_to_nearest(torch.ones(8, 8), SCHEMES["int8"])})
    wrong = {next(iter(stored)): round_to_nearest(torch.ones(8, 8), SCHEMES["int8"])}
    with pytest.raises(
        ModelError, match=r"q_proj is stored quantized as \[8, 8\], the model needs \[64, 64\]"
    ):
        replace(model, KERNELS, stored=wrong)
