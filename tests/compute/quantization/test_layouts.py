"""Words, and tensors that do not fit what the config says; that they are read right is told by `tests/oracle`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.compute.quantization.layouts import (
    AwqLayout,
    Fp8Layout,
    GptqLayout,
    Int8Layout,
    Mxfp4Layout,
    PackedLayout,
    integers_of,
    words_of,
)
from headrace.compute.quantization.weight import QuantizedWeight, stacked
from tests.compute.quantization import packing
from tests.compute.quantization.packing import Linear

SHAPE = (24, 32)
LINEAR = Linear.draw(SHAPE, 4, 8, symmetric=False, mixed=False, seed=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 8, 13])
def test_words_hold_what_was_put_in(bits: int, width: int) -> None:
    limit = 1 << (bits - 1)
    integers = torch.randint(-limit, limit, (5, width)).to(torch.int8)
    words = words_of(integers, bits)
    assert torch.equal(words, packing.packed(integers.int() + limit, bits))
    assert torch.equal(integers_of(words, bits)[:, :width], integers)


def test_a_single_row_or_column_may_lie_in_any_way() -> None:
    """Torch calls the transpose of a single row contiguous, whatever its strides are."""
    column = torch.arange(-8, 8).to(torch.int8)[:, None]
    words = words_of(column.t(), 4)
    assert torch.equal(integers_of(words, 4), column.t())
    assert torch.equal(integers_of(words.t(), 4)[:, :8], column.view(2, 8))


def test_a_zero_stored_as_the_highest_value_is_the_lowest() -> None:
    parts = packing.gptq(LINEAR, 1)
    parts["qzeros"] = torch.full_like(parts["qzeros"], -1)
    zeros = GptqLayout(4, 8, zeros_less_one=True).read(parts, SHAPE).zeros
    assert zeros is not None
    assert (zeros == -8).all()


PACKED = packing.pack_quantized(LINEAR, symmetric=False, ordered=True)
FP8 = {"weight": torch.ones(SHAPE).to(torch.float8_e4m3fn), "weight_scale": torch.ones(2, 2)}
MXFP4 = {
    "blocks": torch.zeros(24, 1, 16, dtype=torch.uint8),
    "scales": torch.full((24, 1), 127, dtype=torch.uint8),
}
INT8 = {"weight": torch.zeros(SHAPE, dtype=torch.int8), "weight_scale": torch.ones(24, 4)}


@pytest.mark.parametrize(
    ("layout", "parts", "message"),
    [
        (GptqLayout(4, 24, True), packing.gptq(LINEAR, 1), "32 inputs are not a multiple of group_size 24"),
        (
            GptqLayout(4, 16, True),
            packing.gptq(LINEAR, 1),
            r"scales has shape \[4, 24\], the config says \[2, 24\]",
        ),
        (GptqLayout(8, 8, True), packing.gptq(LINEAR, 1), "qweight has shape"),
        (
            GptqLayout(4, 8, True),
            packing.gptq(LINEAR, 1) | {"g_idx": torch.zeros(32, dtype=torch.int32)},
            "g_idx does not give every group 8 inputs",
        ),
        (AwqLayout(8), packing.gptq(LINEAR, 1), r"qweight has shape \[4, 24\], the config says \[32, 3\]"),
        (
            PackedLayout(4, 8, False),
            PACKED | {"weight_packed": torch.zeros(24, 3)},
            "weight_packed has shape",
        ),
        (PackedLayout(4, 8, False), PACKED | {"weight_zero_point": torch.zeros(4, 4)}, "weight_zero_point"),
        (
            Int8Layout(None, True, 8),
            {"weight": torch.zeros(SHAPE), "weight_scale": torch.ones(24, 1)},
            "int8",
        ),
        (
            Int8Layout(None, True, 8),
            {"weight": torch.zeros(SHAPE, dtype=torch.int8), "weight_scale": torch.ones(12, 1)},
            r"weight_scale has shape \[12, 1\]",
        ),
        (
            PackedLayout(4, 8, False),
            PACKED | {"weight_scale": torch.ones(25, 1)},
            r"weight_scale has shape \[25, 1\], the config says \[24, 4\]",
        ),
        (
            Int8Layout(8, False, 8),
            INT8 | {"weight_zero_point": torch.zeros(24, 1)},
            r"weight_zero_point has shape \[24, 1\], the config says \[24, 4\]",
        ),
        (Fp8Layout((16, 16)), FP8 | {"weight": torch.zeros(SHAPE)}, "weight is torch.float32"),
        (Fp8Layout((16, 8)), FP8, r"weight_scale has shape \[2, 2\], the config says \[2, 4\]"),
        (Fp8Layout(None), FP8, r"weight_scale has shape \[4\], the config says \[24\]"),
        (Fp8Layout(None), {"weight": FP8["weight"]}, "lacks weight_scale or weight_scale_inv"),
        (
            Fp8Layout((16, 16)),
            FP8 | {"weight_scale_inv": torch.ones(2, 2)},
            "has weight_scale and weight_scale_inv",
        ),
        (
            Fp8Layout((16, 16)),
            FP8 | {"weight_scale": torch.ones(2, 2, dtype=torch.int32)},
            "weight_scale is torch.int32",
        ),
        (Mxfp4Layout(), MXFP4 | {"blocks": torch.zeros(24, 2, 16)}, r"blocks has shape \[24, 2, 16\]"),
        (
            Mxfp4Layout(),
            MXFP4 | {"blocks": torch.zeros(24, 1, 16)},
            "blocks is torch.float32, in MXFP4 it has",
        ),
        (Mxfp4Layout(), MXFP4 | {"scales": MXFP4["scales"][:, 0]}, r"scales has shape \[24\]"),
        (Mxfp4Layout(), MXFP4 | {"scales": MXFP4["scales"] | 128}, r"not a number \(255\)"),
    ],
)
def test_parts_that_do_not_fit_are_named(layout: object, parts: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.read(parts, SHAPE)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_scales_of_fp8_may_be_exponents_as_bytes(name: str) -> None:
    exponents = torch.tensor([[127, 128], [126, 120]], dtype=torch.uint8)
    read = Fp8Layout((16, 16)).read({"weight": FP8["weight"], name: exponents}, SHAPE)
    assert isinstance(read, QuantizedWeight)
    assert read.dequantized()[:, [0, 16]][[0, 16]].tolist() == [[1.0, 2.0], [0.5, 2.0**-7]]


@pytest.mark.parametrize(
    ("block", "scale", "groups"),
    [(None, (), 1), (None, (24,), 1), (None, (24, 1), 1), ((16, 16), (2, 2), 2), ((16, 24), (2, 2), 0)],
)
def test_fp8_is_kept_unless_groups_are_of_different_size(
    block: tuple[int, int] | None, scale: tuple[int, ...], groups: int
) -> None:
    torch.manual_seed(0)
    weight, scales = torch.randn(SHAPE).to(torch.float8_e4m3fn), torch.rand(scale) + 0.5
    read = Fp8Layout(block, 8).read({"weight": weight, "weight_scale": scales}, SHAPE)
    rows, columns = block or (1, SHAPE[1])
    spread = scales.reshape(-1, scales.shape[1] if block else 1)
    spread = spread.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: SHAPE[0], : SHAPE[1]]
    expected = weight.float() * spread
    if not groups:
        assert torch.equal(read, expected)
        return
    assert isinstance(read, QuantizedWeight)
    assert (read.scales.shape, read.activation_bits) == ((24, groups), 8)
    assert torch.equal(read.dequantized(), expected)
    assert torch.equal(read.rows(3, 9).dequantized(), expected[3:9])
    assert torch.equal(stacked([read, read]).dequantized(), torch.cat((expected, expected)))
    with pytest.raises(ValueError, match="same type"):
        stacked([read, QuantizedWeight(torch.zeros(SHAPE, dtype=torch.int8), read.scales, None, None, 8, 8)])


def test_a_missing_group_order_is_that_of_the_inputs() -> None:
    plain = packing.pack_quantized(LINEAR, symmetric=False, ordered=False)
    unset = plain | {"weight_g_idx": torch.full((SHAPE[1],), -1, dtype=torch.int32)}
    layout = PackedLayout(4, 8, False)
    read, expected = layout.read(unset, SHAPE), layout.read(plain, SHAPE)
    assert read.order is None
    assert torch.equal(read.values, expected.values)
