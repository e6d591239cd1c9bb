from __future__ import annotations

import math

import pytest

from benchmarks.peers.shapes import SHAPES, WIDENED
from benchmarks.peers.workloads import IDS
from headrace.compute.model.families import parse_config


@pytest.mark.parametrize(
    ("name", "millions"),
    # 3 layers of 604 M in experts, 0.26 M in the router and 18.9 M in attention, and 19.5 M in the embedding
    [
        ("smollm2-135m", 134.5),
        ("qwen3-0.6b", 596.0),
        ("llama-3.2-1b", 1235.8),
        ("qwen3.5-0.8b", 752.4),
        ("qwen3-30b-a3b-3l", 1888.9),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_model_that_it_is_of(name, millions):
    count = sum(math.prod(size) for _, size in SHAPES[name].tensors())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", WIDENED)
def test_a_draft_model_is_a_fifth_to_an_eighth_of_its_target(name):
    target, draft = (sum(math.prod(size) for _, size in shape.tensors()) for shape in WIDENED[name])
    assert 5 < target / draft < 8


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_headrace_reads_the_config_and_prompts_are_within_the_vocabulary(shape):
    spec = parse_config(shape.config())
    assert spec.vocab_size == shape.vocabulary > max(IDS)
