"""A real decoder by the Triton kernels: what graphs replay, and that it gives the tokens of single launches."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the extra `dev` installs it on Linux")

from headrace.compute.graphs.body import Ending, Variant, compile_others
from headrace.compute.graphs.steps import GraphedSteps, GraphSpec
from headrace.compute.kernels.triton.launches import _KINDS, AttentionPlan, Tiles
from headrace.compute.memory_plan import largest_step_bytes
from headrace.compute.model.kv import PagedKV
from headrace.compute.runner import LocalRunner
from headrace.core.plan import Row, StepPlan
from headrace.lab.plan.launches import GRAPHS
from tests.compute.fakes import entry, row
from tests.compute.graphs.fake_device import FakeDevice, tensors_in, trace_triton
from tests.compute.graphs.lives import watch
from tests.compute.graphs.test_steps import make
from tests.compute.kernels.triton.launches import Launches
from tests.parity.drafted_runs import BLOCK, DEVICE, MAX_LEN, VOCAB, decoder

PROMPTS = ((5, 17, 3, 40, 9), (7, 7, 2))


def runner_of(device: FakeDevice | None, kind: str = "dense") -> LocalRunner:
    model = decoder("triton", kind=kind)
    assert model.graphed
    states = None if model.states is None else model.states.allocate(2, 1, DEVICE)
    spec = None
    if device is not None:
        spec = GraphSpec(device, 3, True, model.spec.hidden_size, model.dtype, 2, 8, states is not None)
    runner = LocalRunner(
        model,
        PagedKV(model.spec.shape, 16, BLOCK, torch.float32, DEVICE),
        vocab_size=VOCAB,
        max_num_seqs=2,
        max_model_len=MAX_LEN,
        device=DEVICE,
        graphs=spec,
        states=states,
    )
    if device is not None:
        watch(device, runner, [*tensors_in(model._stack), *tensors_in(model.head)])
        runner.capture()
    return runner


def tokens_of(runner: LocalRunner, *, drafts: bool = True) -> list[tuple[tuple[int, ...], ...]]:
    """Two prompts, one of them penalized, then decode steps in flight with each other, the last with a draft."""
    entries = (
        entry(0, PROMPTS[0], presence_penalty=0.5, repetition_penalty=1.2),
        entry(1, PROMPTS[1], seed_=3, temperature=1.0, top_p=0.9, top_k=30),
    )
    plans = [
        StepPlan(0, entries, (), (row(0, 0, 5, (3, 1)), row(1, 0, 3, (4,)))),
        StepPlan(1, (), (), (row(0, 5, 1), row(1, 3, 1))),
        StepPlan(2, (), (), (row(0, 6, 1), row(1, 4, 1, (9,)))),
        StepPlan(
            3, (), (), (row(1, 5, 1), Row(0, 7, 2, (2,), True, (11,)))
        ),  # three lines and one of padding
    ]
    if not drafts:
        plans[3:] = [
            StepPlan(3, (), (), (row(1, 5, 1), row(0, 7, 1, (2,)))),
            StepPlan(4, (), (), (row(1, 6, 1),)),
        ]
    for plan in plans:
        runner.launch(plan, 0.0)
    outputs = [runner.collect() for _ in plans]
    assert not any(output.failures for output in outputs)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("kind", ["dense", "experts", "hybrid"])
def test_graphs_give_the_tokens_of_single_launches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every, used = GraphedSteps._variants, (Ending.PENALIZED, Ending.STATES)
    monkeypatch.setattr(  # the interpreter takes long to record the others
        GraphedSteps,
        "_variants",
        lambda graphs, size: (
            each for each in every(graphs, size) if each.ending in used and not each.shares
        ),
    )
    device = FakeDevice()
    trace_triton(device, monkeypatch)
    drafts = kind != "hybrid"
    assert tokens_of(runner_of(device, kind), drafts=drafts) == tokens_of(
        runner_of(None, kind), drafts=drafts
    )
    # Of a hybrid not the prompts, whose rows have several tokens, nor the last step, whose ending is not recorded here.
    assert device.replays == (4 if drafts else 3)


def test_kernels_of_steps_without_a_graph_are_launched_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Single tokens behind many keys and few, a short chunk, a long one."""
    launched = set[tuple[str, bool]]()

    def launch(plan: AttentionPlan, queries: torch.Tensor, pages: object, tiles: Tiles, *_: object) -> None:
        assert tiles.table is not None
        kinds = {rows: kind for kind, (rows, _) in _KINDS.items()}
        launched.add((kinds[tiles.shape.rows], tiles.splits > 1))

    monkeypatch.setattr(AttentionPlan, "_launch", launch)
    monkeypatch.setattr(AttentionPlan, "_join", lambda *_: None)
    model = decoder("triton")
    compile_others(model, PagedKV(model.spec.shape, 1, BLOCK, torch.float32, DEVICE), 2048)
    assert launched == {("decode", True), ("decode", False), ("mixed", False), ("prefill", False)}


def test_a_hybrid_computes_the_steps_before_its_memory_is_sized_and_before_requests() -> None:
    model = decoder("torch", kind="hybrid")
    assert model.states is not None
    most = largest_step_bytes(
        model, Nothing(), block_size=BLOCK, kv_dtype=torch.float32, max_model_len=MAX_LEN, max_num_seqs=3,
        max_num_batched_tokens=40,
    )  # fmt: skip
    assert most == 7
    states = model.states.allocate(1, 0, DEVICE)
    compile_others(model, PagedKV(model.spec.shape, 1, BLOCK, torch.float32, DEVICE), MAX_LEN, states)


class Nothing:
    """A meter of a device whose memory is not measured."""

    def begin(self) -> None:
        pass

    def end(self) -> int:
        return 7


def test_a_graph_packs_with_as_many_operations_as_the_static_model_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, _ = make(FakeDevice())
    graphs = runner._graphs
    assert graphs is not None
    runner.capture()
    with torch.no_grad(), Launches(monkeypatch) as launched:
        graphs._body.run(Variant(1, Ending.LIKELIEST, verifies=False))
    launched.names.remove("clone")  # what the decoder without weights does in place of its head
    assert len(launched.names) == GRAPHS.packing, launched.names
