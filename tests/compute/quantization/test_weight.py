from dataclasses import replace

import pytest
import torch

from headrace.compute.quantization.weight import QuantizedWeight, pack_halves, stacked


def weight(bits=4, outputs=3, inputs=8, groups=2, zeros=False, order=None, seed=0):
    """A random weight, and its integers."""
    generator = torch.Generator().manual_seed(seed)
    limit = 1 << (bits - 1)
    integers = torch.randint(-limit, limit, (outputs, inputs), generator=generator).to(torch.int8)
    points = torch.randint(-limit, limit, (outputs, groups), generator=generator).to(torch.int8)
    scales = torch.rand(outputs, groups, generator=generator) + 0.5
    values = pack_halves(integers) if bits == 4 else integers
    return QuantizedWeight(values, scales, points if zeros else None, order, bits, 16), integers


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_those_that_were_packed(bits):
    quantized, integers = weight(bits)
    assert quantized.shape == (3, 8)
    assert quantized.group_size == 4
    assert torch.equal(quantized.integers(), integers)
    assert quantized.values.dtype == (torch.uint8 if bits == 4 else torch.int8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_weight_is_value_less_zero_times_scale(bits, zeros):
    quantized, integers = weight(bits, zeros=zeros)
    dense = quantized.dequantized()
    for out in range(3):
        for column in range(8):
            group = column // 4
            zero = int(quantized.zeros[out, group]) if zeros else 0
            expected = (int(integers[out, column]) - zero) * float(quantized.scales[out, group])
            assert dense[out, column].item() == pytest.approx(expected)


def test_inputs_in_another_order_give_the_same_product():
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    quantized, _ = weight(order=order)
    x = torch.randn(2, 8)
    plain = replace(quantized, order=None)
    torch.testing.assert_close(x @ quantized.dequantized().T, x[:, order] @ plain.dequantized().T)


def test_stacked_weights_are_their_rows_one_after_another():
    first, second = weight(seed=1)[0], weight(seed=2, zeros=True)[0]
    both = stacked([first, second])
    torch.testing.assert_close(both.dequantized(), torch.cat([first.dequantized(), second.dequantized()]))
    assert both.nbytes == 24 + 48 + 12


def based(part):
    """The weight with minima, in scales of 11 bits as files have them."""
    scales = part.scales.half().float()
    return replace(part, scales=scales, minima=-3.3 * scales)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_minimum_is_the_weight_of_the_lowest_value(bits):
    quantized = based(weight(bits)[0])
    dense, integers = quantized.dequantized(), quantized.integers().float()
    minima = quantized.minima.repeat_interleave(4, 1)
    expected = (integers + (1 << (bits - 1))) * quantized.scales.repeat_interleave(4, 1) + minima
    assert torch.equal(dense, expected)
    assert quantized.kind.endswith("in groups of 4 with minima")
    assert torch.equal(quantized.rows(1, 3).dequantized(), dense[1:3])
    assert torch.equal(quantized.columns(4, 8).dequantized(), dense[:, 4:8])
    assert torch.equal(quantized.to("cpu").dequantized(), dense)
    assert quantized.nbytes == quantized.values.nbytes + 2 * quantized.scales.nbytes


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (weight(bits=8, zeros=True, seed=1)[0], "W8A16 in groups of 4"),
        (weight(groups=4, seed=1)[0], "W4A16 in groups of 2"),
        (weight(bits=8, groups=1, seed=1)[0], "W8A16 in groups of 4"),
        (based(weight(seed=1)[0]), "W4A16 in groups of 4 with minima"),
        (based(weight(bits=8, groups=4, seed=1)[0]), "W8A16 in groups of 2 with minima"),
    ],
)
def test_parts_of_different_kinds_take_a_common_form_without_a_change(other, kind):
    first = weight()[0]
    first = replace(first, scales=first.scales.half().float())
    for parts in ([first, other], [other, first]):
        both = stacked(parts)
        assert both.kind == kind
        assert torch.equal(both.dequantized(), torch.cat([part.dequantized() for part in parts]))


FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def in_fp4(seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (3, 4), generator=generator).to(torch.uint8)
    scales = torch.tensor([[0.5, 4.0], [2**-20, 1.0], [2**-126, 2.0]])
    return QuantizedWeight(values, scales, None, None, 4, 16, fp4=True)


def test_codes_of_fp4_are_twice_their_floats():
    quantized = in_fp4()
    for row, column in ((row, column) for row in range(3) for column in range(8)):
        code = int(quantized.values[row, column // 2]) >> (4 * (column % 2)) & 15
        expected = (-1 if code & 8 else 1) * FP4[code & 7] * 2 * float(quantized.scales[row, column // 4])
        assert quantized.dequantized()[row, column].item() == expected
    assert quantized.kind == "fp4 W4A16 in groups of 4"
    assert torch.equal(quantized.in_bytes().dequantized(), quantized.dequantized())
    assert torch.equal(quantized.columns(4, 8).dequantized(), quantized.dequantized()[:, 4:8])
    assert torch.equal(
        quantized.reordered(torch.tensor([2, 0])).dequantized(), quantized.dequantized()[[2, 0]]
    )


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (in_fp4(1), "fp4 W4A16 in groups of 4"),
        (weight(groups=4)[0], "W8A16 in groups of 2"),
        (weight(bits=8, zeros=True)[0], "W8A16 in groups of 4"),
    ],
)
def test_fp4_beside_integers_takes_eight_bits(other, kind):
    for parts in ([in_fp4(), other], [other, in_fp4()]):
        both = stacked(parts)
        assert both.kind == kind
        assert torch.equal(both.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_a_form_that_would_round_weights_is_refused():
    first = replace(weight(bits=8)[0], scales=torch.rand(3, 2) + 1 / 3)
    with pytest.raises(ValueError, match="not exact in float32"):
        stacked([first, based(weight(bits=8)[0])])


@pytest.mark.parametrize(
    "other",
    [weight(order=torch.arange(8))[0], replace(weight()[0], activation_bits=8)],
)
def test_weights_that_differ_in_kind_are_not_stacked(other):
    with pytest.raises(ValueError, match="same type, order and activations"):
        stacked([weight()[0], other])
