from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.compute.kernels import Kernels, KernelsUnavailable, select
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.stack import Stack
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.weights import dummy_weights


class Plain:
    """Kernels that keep every weight as it is."""

    def prepare_stack(self, stack: Stack) -> Stack:
        return stack

    def prepare_linear(self, weight: torch.Tensor, *, consume: bool = False) -> torch.Tensor:
        return weight

    def prepare_greedy(self, *given: object) -> None:
        return None


class Copying(Plain):
    """Kernels with a layout of their own."""

    def prepare_linear(self, weight: torch.Tensor, *, consume: bool = False) -> torch.Tensor:
        return weight.clone()


def test_a_tied_head_is_counted_where_it_takes_memory_of_its_own() -> None:
    spec = replace(parse_config(read_config(resolve_folder("builtin"))), dtype="float32")
    assert spec.tied_embeddings
    cpu = torch.device("cpu")
    once, twice = (dummy_weights(spec, torch.float32, cpu) for _ in range(2))
    assert Decoder(spec, once, Plain(), 64).nbytes == once.nbytes  # type: ignore[arg-type]
    packed = Decoder(spec, twice, Copying(), 64)  # type: ignore[arg-type]
    assert packed.nbytes == twice.nbytes + twice.embedding.nbytes


@pytest.mark.parametrize("name", ["torch", "cpp"])
def test_a_tied_head_in_float32_beside_a_table_in_bfloat16(name: str) -> None:
    try:
        kernels: Kernels = select(name, torch.device("cpu"))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    spec = replace(parse_config(read_config(resolve_folder("builtin"))), dtype="bfloat16")
    weights = dummy_weights(spec, torch.float32, "cpu")
    assert weights.head is weights.embedding
    table, nbytes = weights.embedding, weights.nbytes
    assert table.dtype == torch.bfloat16
    decoder = Decoder(spec, weights, kernels, 64)
    assert decoder.dtype == torch.float32
    states = torch.randn(5, spec.hidden_size)
    expected = kernels.linear(states, kernels.prepare_linear(table.float()))
    assert torch.equal(decoder.logits(states), expected)
    if name == "torch":
        assert decoder.nbytes == nbytes + 2 * table.nbytes


def test_a_screen_is_counted_and_only_where_likeliest_tokens_are_outputs_of_the_head() -> None:
    cpu, spec = torch.device("cpu"), parse_config(read_config(resolve_folder("builtin")))
    try:
        kernels = CppKernels()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    if kernels.isa not in ("avx512_vnni", "avx512_bf16"):
        pytest.skip(f"{kernels.isa} multiplies no bytes")
    scaled = replace(spec, logits_scale=2.0), replace(spec, logits_softcap=30.0)
    plain, *others, greedy = (
        Decoder(each, dummy_weights(spec, torch.float32, cpu), kernels, 64, greedy=asked)
        for each, asked in ((spec, False), (scaled[0], True), (scaled[1], True), (spec, True))
    )
    wider = plain.head.saved - greedy.head.saved  # only a head without a screen may be coded
    assert greedy.nbytes == plain.nbytes + wider + greedy.head.screen.nbytes
    assert greedy.head.screen.nbytes >= spec.vocab_size * spec.hidden_size
    assert all(each.head.screen is None for each in (plain, *others))
    states = torch.randn(5, spec.hidden_size)
    assert torch.equal(greedy.likeliest_after(states), greedy.likeliest(greedy.logits(states)))


def test_logits_in_16_bits_are_not_rounded() -> None:
    cpu = torch.device("cpu")
    try:
        kernels = select("cpp", cpu)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    spec = parse_config(read_config(resolve_folder("builtin")))
    decoder = Decoder(spec, dummy_weights(spec, torch.bfloat16, cpu), kernels, 64)
    states = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = decoder.logits(states)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.bfloat16(), kernels.linear(states, decoder.head))
    assert not torch.equal(logits, logits.bfloat16().float())
