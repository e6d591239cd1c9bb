"""Which graphs a model records, and what the memory plan says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.compute.graphs import steps
from headrace.compute.graphs.steps import MOST_TOKENS, Captured, describe_graphs, graph_sizes, plan_graphs
from headrace.compute.kernels import HeadShape
from headrace.config import ModelOptions, Options
from headrace.wiring.loading.memory import _graphs


def decoder(device: str = "cuda", kernels: str = "triton", states: object = None) -> Any:
    heads = HeadShape(32, 8, 64)
    shape = SimpleNamespace(hidden_size=64, intermediate_size=128, vocab_size=1000, heads=heads)
    names = SimpleNamespace(name=kernels)
    of = {"kernels": names, "shape": shape, "dtype": torch.bfloat16, "states": states}
    return SimpleNamespace(device=torch.device(device), graphed=True, **of)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CudaRecorder", lambda device: f"recorder of {device}")


def test_graphs_are_recorded_on_a_gpu_by_kernels_that_allow_it() -> None:
    planned = plan_graphs(decoder(), 20, None, 8192)
    assert planned.spec is not None
    assert [*planned.spec][:3] == ["recorder of cuda", 20, False]
    assert planned.bytes > (5 * len(graph_sizes(20)) << 20) + 20 * 1000 * 4
    for other in (decoder("cpu"), decoder(kernels="torch")):
        assert plan_graphs(other, 20, None, 8192) == (None, 0)


def test_graphs_beside_recurrent_states_have_rows_of_one_token() -> None:
    for states, single in ((None, False), (object(), True)):
        spec = plan_graphs(decoder(states=states), 20, None, 8192).spec
        assert spec is not None
        assert spec.single is single


def test_options_and_other_ranks_forbid_graphs() -> None:
    whole: Any = SimpleNamespace(decoder=decoder(), leader=None)
    part: Any = SimpleNamespace(decoder=decoder(), leader=object())
    assert _graphs(Options(model=ModelOptions(enforce_eager=True)), whole, 8192) == (None, 0)
    assert _graphs(Options(), part, 8192) == (None, 0)
    assert _graphs(Options(), whole, 8192).spec is not None


@pytest.mark.parametrize(("most", "tokens"), [(300, 300), (8192, MOST_TOKENS)])
def test_graphs_of_prompts_end_at_the_largest_step(most: int, tokens: int) -> None:
    spec = plan_graphs(decoder(), 20, None, most).spec
    assert spec is not None
    assert spec.tokens == tokens


@pytest.mark.parametrize(("rows", "lines"), [(20, 100), (400, 512)])
def test_drafts_take_a_line_each(rows: int, lines: int) -> None:
    spec = plan_graphs(decoder(), rows, 4, 8192).spec
    assert spec is not None
    assert spec[1:3] == (lines, True)


@pytest.mark.parametrize(("drafts", "tokens"), [(None, 8), (1, 2), (4, 5), (20, 8)])
def test_a_row_with_drafts_is_cut_to_what_attention_computes_together(
    drafts: int | None, tokens: int
) -> None:
    """Four heads of queries share one of keys, so eight tokens are a tile of 32."""
    spec = plan_graphs(decoder(), 8, drafts, 8192).spec
    assert spec is not None
    assert spec.row_tokens == tokens


def test_what_was_recorded_is_described() -> None:
    assert describe_graphs(Captured(140, 256, 1 << 30, 3.21)) == (
        "140, for up to 256 tokens per step, recorded in 3.2 s"
    )
    failed = describe_graphs(Captured(8, 4, 0, 1.0, "8 lines: CUDA out of memory."))
    assert "recording failed at 8 lines: CUDA out of memory. (lower --gpu-memory-utilization" in failed
