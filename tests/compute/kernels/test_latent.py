"""Attention over latents: the C++ kernels against the definition in torch."""

from __future__ import annotations

import pytest
import torch

from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.latent import FewTokens, absorbed
from headrace.compute.kernels.native_latent import NativeExpansion

LEVELS = CppKernels().levels
SIZES = {
    "toy": (3, 6, 10, 4, 8, 5),
    "odd heads": (20, 48, 64, 16, 40, 16),
    "many heads": (129, 16, 32, 32, 16, 16),
}
"""Heads, plain, rank, rotary, value, and the size of a block."""


def _case(
    dtype: torch.dtype, heads: int, plain: int, rank: int, rotary: int, value: int, block: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, FewTokens]:
    torch.manual_seed(1)
    lengths, contexts = [1, 3, 16, 2, 1], [1, 515, 1030, 2, 700]
    tokens, width = sum(lengths), -(-max(contexts) // block)
    tables = torch.randperm(5 * width, dtype=torch.int32).view(5, width)
    made = [
        torch.randn(*shape).to(dtype)
        for shape in (
            (tokens, heads, plain + rotary),
            (heads, plain, rank),
            (heads, value, rank),
            (5 * width, block, 1, rank + rotary),
        )
    ]
    return made[0], (made[1] / plain**0.5, made[2]), made[3], FewTokens(lengths, contexts, tables)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_kernel_equals_the_definition(sizes: tuple[int, ...], dtype: torch.dtype, level: str) -> None:
    query, expansion, pages, rows = _case(dtype, *sizes)  # type: ignore[arg-type]
    kernels, scale = CppKernels(level), 0.3
    prepared = kernels.prepare_expansion(*expansion)
    assert isinstance(prepared, NativeExpansion)
    out = kernels.attend_latents(query, prepared, pages, rows, scale)
    wide = [each.float() for each in (query, *expansion, pages)]
    expected = absorbed(wide[0], (wide[1], wide[2]), wide[3], rows, scale)
    assert out.dtype == dtype
    error = (out.float() - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_row_depends_on_no_other() -> None:
    query, expansion, pages, rows = _case(torch.bfloat16, *SIZES["odd heads"])
    kernels = CppKernels()
    prepared = kernels.prepare_expansion(*expansion)
    out = kernels.attend_latents(query, prepared, pages, rows, 0.3).split(rows.lengths)
    for row, part in enumerate(query.split(rows.lengths)):
        of = FewTokens(rows.lengths[row : row + 1], rows.contexts[row : row + 1], rows.tables[row : row + 1])
        assert torch.equal(kernels.attend_latents(part, prepared, pages, of, 0.3), out[row])


def test_the_number_of_threads_changes_nothing() -> None:
    query, expansion, pages, rows = _case(torch.float32, *SIZES["many heads"])
    kernels = CppKernels()
    prepared = kernels.prepare_expansion(*expansion)
    before, results = kernels.threads, []
    try:
        for kernels.threads in (1, 3):
            results.append(kernels.attend_latents(query, prepared, pages, rows, 0.3))
    finally:
        kernels.threads = before
    assert torch.equal(*results)


def test_rows_that_do_not_fit_are_refused() -> None:
    query, expansion, pages, rows = _case(torch.float32, *SIZES["toy"])
    kernels = CppKernels()
    prepared = kernels.prepare_expansion(*expansion)
    with pytest.raises(IndexError, match="there are 200"):
        kernels.attend_latents(query, prepared, pages[:200], rows, 0.3)
    with pytest.raises(ValueError, match="with 10 of rank"):
        kernels.attend_latents(query, prepared, pages[..., :-1], rows, 0.3)
    with pytest.raises(ValueError, match="of 3 heads"):
        kernels.attend_latents(query[:, :2], prepared, pages, rows, 0.3)
