"""Adapters in Triton: rows of several in a step, against the definition; rows without one stay as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.compute.batch import AdapterTokens
from headrace.compute.kernels.adapters import Change, Part, StepChanges
from headrace.compute.kernels.stack import apply
from headrace.compute.kernels.triton.adapting import DeviceAdapter
from headrace.compute.kernels.triton.backend import TritonKernels
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE, close
from tests.compute.kernels.test_adapters import BATCHES, LEFT_OUT, adapter, rows_of
from tests.compute.kernels.test_stack import DECODING, make, pages_for

KERNELS = TritonKernels(CPU)


def prepared(layers: list[dict[str, Change]]) -> DeviceAdapter:
    return KERNELS.prepare_adapter(layers, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["plain", "W4A16"])
def test_rows_of_several_adapters_are_those_of_the_definition(kind: str) -> None:
    """Ranks that differ, also those of an adapter's parts; linear layers that one leaves out; rows without one."""
    ours, theirs = (make(kernels, torch.float32, kind, inner=64) for kernels in (KERNELS, ORACLE))
    one = adapter(1, torch.float32, inner=64)
    other = adapter(2, torch.float32, (18, 1, 2), LEFT_OUT, inner=64)
    written = pages_for(torch.float32), pages_for(torch.float32)
    for batch in BATCHES:
        rows = len(batch.lengths)
        actual = KERNELS.run_stack(
            ours, rows_of(batch, [prepared(one), None, prepared(other)][:rows]), written[0]
        )
        expected = apply(ORACLE, theirs, rows_of(batch, [one, None, other][:rows]), written[1])
        close(actual, expected, torch.float32, least=1e-4)


def random_change(inputs: int, sizes: list[int], ranks: list[int], dtype: torch.dtype) -> Change:
    downs = [torch.randn(rank, inputs) / inputs**0.5 for rank in ranks]
    starts = np.cumsum([0, *sizes])
    parts = [
        Part(int(at), (torch.randn(size, rank) / rank**0.5).to(dtype))
        for at, size, rank in zip(starts, sizes, ranks, strict=False)
    ]
    return Change(torch.cat(downs).to(dtype), tuple(parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [[1, 1, 1], [64, 8, 16], [100, 3, 70]])
def test_a_linear_layer_of_many_tokens(ranks: list[int], dtype: torch.dtype) -> None:
    """Several tiles of an adapter, and more outputs than a program computes."""
    torch.manual_seed(0)
    sizes, tokens, inputs = [130, 24, 24], 45, 72
    layers = [
        [{"qkv": random_change(inputs, sizes, each, dtype)}] for each in (ranks, [2, 2, 2], ranks[::-1])
    ]
    owners = torch.randint(0, 4, (tokens,))
    x, out = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, sum(sizes)).to(dtype)

    def batch(each: list[object]) -> object:
        given = [AdapterTokens(one, np.flatnonzero(owners == number)) for number, one in enumerate(each)]
        return replace(DECODING, adapters=tuple(given), kept={})

    changes = KERNELS.step_changes(batch([prepared(each) for each in layers]))  # type: ignore[arg-type]
    actual = changes.add(0, "qkv", x, out.clone())
    defined = StepChanges(
        batch(
            [
                [{"qkv": Change(c.down.float(), tuple(Part(a, u.float()) for a, u in c.parts))}]
                for c in (e[0]["qkv"] for e in layers)
            ]
        )
    )  # type: ignore[arg-type]
    close(actual, defined.add(0, "qkv", x.float(), out.float().clone()), dtype)
    assert torch.equal(actual[owners == 3], out[owners == 3])
    assert changes.add(0, "down", x, out) is out
    wanted = torch.tensor([0, 7, 44])
    changes.keep(wanted)
    some = changes.add(0, "qkv", x[wanted], out[wanted].clone())
    assert torch.equal(some, actual[wanted])
    changes.keep(torch.tensor([], dtype=torch.int64))
    assert not changes.add(0, "qkv", x[:0], out[:0]).numel()
