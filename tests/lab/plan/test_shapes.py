from __future__ import annotations

import pytest

from headrace.lab.plan.roofline import SHAPES

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_248_023_552,
    "phi-3-mini": 3_821_079_552,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
}
"""Numbers of weights as the models' safetensors files have them."""


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_published_ones(name):
    assert SHAPES[name].num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama-3.1-8b", 128), ("qwen3-8b", 144), ("qwen3-4b", 144), ("qwen3-0.6b", 112), ("phi-3-mini", 384)],
)
def test_bytes_of_keys_and_values(name, kib):
    assert SHAPES[name].kv_bytes_per_token() == kib * 1024
    assert SHAPES[name].kv_bytes_per_token(element_bytes=1) == kib * 512
