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


@pytest.mark.parametrize(
    "other",
    [
        weight(bits=8)[0],
        weight(groups=4)[0],
        weight(order=torch.arange(8))[0],
        replace(weight()[0], activation_bits=8),
    ],
)
def test_weights_that_differ_in_kind_are_not_stacked(other):
    with pytest.raises(ValueError, match="same bits, groups and order"):
        stacked([weight()[0], other])
