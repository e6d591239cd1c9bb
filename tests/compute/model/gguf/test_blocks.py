"""Each type of tensors, bit for bit against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from headrace.compute.model.gguf import blocks
from headrace.compute.model.gguf.blocks import SUPPORTED, read
from headrace.compute.model.gguf.file import TYPES
from headrace.compute.quantization.weight import QuantizedWeight
from tests.compute.model.gguf.models import FLOATS, kind_of, random_blocks


def test_sizes_of_all_types_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        if kind.name != "NVFP4":  # not in all versions of the package
            known = GGMLQuantizationType(number)
            assert (known.name, *GGML_QUANT_SIZES[known]) == kind


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("at_once", [1 << 24, 1024])
def test_quantized_types_are_equal_to_the_package(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_ELEMENTS_AT_ONCE", at_once)
    kind = kind_of(name)
    data = random_blocks(kind, 7, 512)
    weight = read(kind, data)
    assert isinstance(weight, QuantizedWeight)
    expected = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[name]))
    assert torch.equal(weight.dequantized(), expected)
    assert weight.shape == (7, 512)
    assert weight.activation_bits == 16


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_equal_to_the_package(name: str) -> None:
    kind = kind_of(name)
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    data = quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8).reshape(3, -1)
    tensor = read(kind, data)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape == (3, 64)
    expected = (
        quants.dequantize(data, GGMLQuantizationType[name])
        if name == "BF16"
        else data.view(tensor.numpy().dtype)
    )
    assert torch.equal(tensor.float(), torch.from_numpy(expected.astype(np.float32)))


def test_each_type_is_tested() -> None:
    assert set(FLOATS) | {"F32", "F16", "BF16"} == set(SUPPORTED)
