from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.compute.drafting.forward import Forward, Rows
from headrace.compute.kernels import Drafted, Kernels, KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.weights import load_weights

CPU = torch.device("cpu")
BLOCK, BLOCKS = 16, 24
PROMPTS = ([1, 3, 300, 17, 9, 4], [1, 3, 5], [1, 900, 901, 902] * 5, [1, 3, 77, 12])
MOST = (5, 1, 7, 3)

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable:
    LEVELS = ()


def decoder(kernels: Kernels, dtype: torch.dtype, quantization: str | None = None) -> Decoder:
    folder = resolve_folder("builtin-draft")
    spec = parse_config(read_config(folder))
    return Decoder(spec, load_weights(folder, spec, dtype, CPU, quantization), kernels, 128)


class PassByPass:
    """A decoder without the single call."""

    def __init__(self, decoder: Decoder) -> None:
        self.hidden, self.logits = decoder.hidden, decoder.logits

    def draft(self, *call: object) -> None:
        """There is none."""


def rows(kept: int = 4) -> tuple[Rows, Any]:
    """Rows of one token first: the first ones have computed all but their last token before."""
    lengths = [len(tokens) for tokens in PROMPTS]
    order = sorted(range(kept), key=lambda i: lengths[i])
    tables = np.arange(BLOCKS - kept * 3, BLOCKS, dtype=np.int32).reshape(kept, 3)[:, ::-1].copy()
    packed = [token for i in order for token in PROMPTS[i]]
    sizes = np.array([lengths[i] for i in order])
    most = np.array([MOST[i] for i in order])
    return Rows(np.array(packed, dtype=np.int32), np.zeros(kept, dtype=np.int64), sizes, tables), most


def draft(
    target: Any, least: float, dtype: torch.dtype, spec: Any, kv_dtype: torch.dtype | None = None
) -> Drafted:
    kv = PagedKV(spec.shape, BLOCKS, BLOCK, kv_dtype or dtype)
    given, most = rows()
    with torch.inference_mode():
        return Forward(target, kv).draft(given, np.cumsum(given.lengths) - 1, most, least)


def greedy(model: Decoder, tokens: list[int], count: int) -> list[int]:
    """Without pages that are reused: the whole sequence again for each token."""
    known = list(tokens)
    for _ in range(count):
        kv = PagedKV(model.spec.shape, BLOCKS, BLOCK, model.dtype)
        one = Rows(
            np.array(known, dtype=np.int32),
            np.zeros(1, dtype=np.int64),
            np.array([len(known)]),
            np.arange(3, dtype=np.int32)[None],
        )
        with torch.inference_mode():
            batch = Forward(model, kv)._pack(one, np.array([len(known) - 1]))
            known.append(int(model.forward(batch, kv).argmax()))
    return known[len(tokens) :]


@pytest.mark.parametrize("kernels", [TorchKernels, *([CppKernels] if LEVELS else [])])
def test_drafts_are_the_greedy_text_of_the_model(kernels: type[Any]) -> None:
    model = decoder(kernels(), torch.float32)
    drafted = draft(model, 0.0, torch.float32, model.spec)
    given, most = rows()
    firsts = np.cumsum(given.lengths) - given.lengths
    for row, (first, length) in enumerate(zip(firsts, given.lengths, strict=True)):
        expected = greedy(model, given.tokens[first : first + length].tolist(), int(most[row]))
        assert drafted.tokens[row, : most[row]].tolist() == expected
    assert drafted.counts.tolist() == most.tolist()
    assert drafted.computed.tolist() == (most - 1).tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("least", [0.0, 0.2])
@pytest.mark.parametrize(
    ("dtype", "quantization", "kv_dtype"),
    [
        (torch.float32, None, None),
        (torch.bfloat16, None, None),
        (torch.bfloat16, "int8", torch.int8),
        (torch.float32, "int4", None),
    ],
)
def test_one_call_drafts_as_pass_by_pass(
    level: str, least: float, dtype: torch.dtype, quantization: str | None, kv_dtype: torch.dtype | None
) -> None:
    model = decoder(CppKernels(level), dtype, quantization)
    at_once = draft(model, least, dtype, model.spec, kv_dtype)
    expected = draft(PassByPass(model), least, dtype, model.spec, kv_dtype)
    assert at_once.counts.tolist() == expected.counts.tolist()
    assert at_once.computed.tolist() == expected.computed.tolist()
    assert at_once.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(at_once.probabilities, expected.probabilities, rtol=1e-4)
    if least:
        assert len(set((rows()[1] - at_once.counts).tolist())) > 1, "no draft ended early"


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels are not built")
def test_one_call_refuses_drafts_beyond_the_blocks_of_their_row() -> None:
    model = decoder(CppKernels(), torch.float32)
    kv = PagedKV(model.spec.shape, BLOCKS, BLOCK, torch.float32)
    given, most = rows()
    wanted = np.cumsum(given.lengths) - 1
    for broken, count in (
        (given._replace(tables=given.tables[:, :2]), most + 20),
        (given._replace(tables=np.where([[0, 0, 1]], BLOCKS, given.tables).astype(np.int32)), most + 40),
        (given, most * 0),
        (given, most + 120),
    ):
        with pytest.raises(IndexError):
            Forward(model, kv).draft(broken, wanted, count, 0.0)
    with pytest.raises(IndexError):
        Forward(model, kv).draft(given, wanted - 1, most, 0.0)
