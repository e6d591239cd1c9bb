"""Recording graphs, and what happens when memory ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.compute import shared_keys
from headrace.compute.batch import Batch
from headrace.compute.graphs import steps
from headrace.compute.graphs.body import Variant
from headrace.compute.graphs.steps import (
    MOST_LINES,
    MOST_TOKENS,
    GraphSpec,
    few_sizes,
    graph_sizes,
    prompt_sizes,
)
from headrace.compute.model.kv import PagedKV
from headrace.compute.runner import LocalRunner
from headrace.compute.sampling.penalties import IN_PROMPT
from headrace.core.events import Finished
from headrace.core.plan import Row, StepPlan
from headrace.core.request import FinishReason, Request, SamplingParams
from tests.compute.fakes import BLOCK, FakeKV, entry, greedy, row
from tests.compute.graphs.fake_device import FakeDevice
from tests.compute.graphs.lives import MAX_LEN, VOCAB, OpaqueDecoder, Shape, engine_of, watch

PROMPT = (5, 17, 3, 40, 9)


def make(
    device: FakeDevice, lines: int = 4, drafts: bool = False, tokens: int = 1
) -> tuple[LocalRunner, OpaqueDecoder]:
    decoder = OpaqueDecoder()
    runner = LocalRunner(
        decoder,  # type: ignore[arg-type]
        FakeKV(32),  # type: ignore[arg-type]
        vocab_size=VOCAB,
        max_num_seqs=4,
        max_model_len=MAX_LEN,
        device=torch.device("cpu"),
        graphs=GraphSpec(device, lines, drafts, VOCAB, torch.float32, 2, tokens),
    )
    watch(device, runner)
    return runner, decoder


def decode(runner: LocalRunner, steps: int, **params: object) -> list[int]:
    """A prompt and ``steps`` tokens behind it, each step collected before the next."""
    drawn = []
    first = entry(2, PROMPT, (), **params)
    plans = [StepPlan(0, (first,), (), (row(2, 0, len(PROMPT), (3, 1)),))]
    for step in range(1, steps):
        at = len(PROMPT) + step - 1
        plans.append(StepPlan(step, (), (), (row(2, at, 1, (10 + at,) if at % 4 == 0 else ()),)))
    for plan in plans:
        runner.launch(plan, 0.0)
        output = runner.collect()
        assert not output.failures
        drawn += output.tokens[0]
    return drawn


def test_few_sizes_have_graphs_for_shared_prefixes_too() -> None:
    assert few_sizes(graph_sizes(1)) == ()
    assert few_sizes(graph_sizes(40)) == (2, 4, 8, 16, 24, 32, 40)
    for lines in range(2, MOST_LINES + 1):
        size = next(each for each in few_sizes(graph_sizes(MOST_LINES)) if each >= lines)
        assert size < 2 * lines
        assert few_sizes(graph_sizes(lines))[-1] == graph_sizes(lines)[-1]


def test_sizes_for_prompts_go_further() -> None:
    assert prompt_sizes(40) == few_sizes(graph_sizes(40))
    assert prompt_sizes(10_000)[-1] == MOST_TOKENS
    for tokens in range(MOST_LINES + 1, MOST_TOKENS + 1):
        size = next(each for each in prompt_sizes(MOST_TOKENS) if each >= tokens)
        assert size - tokens < (64 if tokens <= 1024 else 128)
        assert prompt_sizes(tokens)[-1] == size


def test_sizes_hold_every_number_of_lines_with_little_padding() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 8)
    assert graph_sizes(10_000)[-1] == MOST_LINES
    for lines in range(1, MOST_LINES + 1):
        size = next(each for each in graph_sizes(MOST_LINES) if each >= lines)
        assert size - lines < (16 if lines > 256 else 8)
        assert graph_sizes(lines)[-1] == size


def test_the_largest_graph_is_recorded_first_and_full_memory_leaves_the_smaller_ones() -> None:
    device = FakeDevice(room=10 + 10)
    runner, _ = make(device, lines=4)
    captured = runner.capture()
    assert captured is not None
    # Sizes 4 and 2 have five graphs each, and five for shared prefixes: one for each ending, and states with drafts.
    # Nothing is left for size 1.
    assert (captured.graphs, captured.lines, captured.bytes) == (20, 4, 20 << 20)
    assert captured.problem == "1 lines: CUDA out of memory. Tried to allocate 2.00 MiB."
    assert decode(runner, 6) == greedy_of(6)
    assert device.replays == 5  # by the graph of two lines
    assert runner.padding_tokens == 5


def greedy_of(count: int) -> list[int]:
    return greedy(PROMPT, count, VOCAB)


def test_without_any_graph_steps_are_launched_one_by_one() -> None:
    device = FakeDevice(room=0)
    runner, _ = make(device)
    captured = runner.capture()
    assert captured is not None
    assert (captured.graphs, captured.lines) == (0, 0)
    assert captured.problem.startswith("4 lines: CUDA out of memory")
    assert decode(runner, 6) == greedy_of(6)
    assert device.replays == 0


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "seed_": 3},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "temperature": 0.9},
        {"logprobs": 1},
        {"min_tokens": 3},
    ],
)
def test_each_ending_gives_the_tokens_of_a_step_without_graphs(params: dict[str, object]) -> None:
    device = FakeDevice()
    runner, _ = make(device)
    runner.capture()
    bare, _ = make(FakeDevice(room=0))
    bare.capture()
    assert decode(runner, 8, **params) == decode(bare, 8, **params)
    assert device.replays == 7


def test_a_step_without_memory_fails_its_requests_and_the_next_one_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, decoder = make(FakeDevice(room=0))
    runner.capture()

    def full(given: Batch, kv: FakeKV) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nMore.")

    plan = StepPlan(0, (entry(1, PROMPT),), (), (row(1, 0, 5, (3, 4)),))
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "hidden", full)
        runner.launch(plan, 0.0)
        output = runner.collect()
    assert output.tokens == ((),)
    assert list(output.failures) == [0]
    assert output.failures[0].startswith(
        "the device is out of memory in this step: CUDA out of memory. Tried to allocate 1.00 GiB. If this"
    )
    assert decode(runner, 3) == greedy_of(3)


def test_an_engine_goes_on_after_a_step_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner, _ = engine_of(Shape(4, 20, 16, 0, True, 4, 1 << 30), FakeDevice(), None)
    decoder = runner._decoder
    hidden, left = decoder.hidden, [1]

    def full_once(given: Batch, kv: PagedKV) -> torch.Tensor:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden(given, kv)

    monkeypatch.setattr(decoder, "hidden", full_once)
    params, now = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), 0.0
    ends: dict[str, Finished] = {}
    for number in range(3):
        engine.submit(Request(f"r{number}", (*PROMPT, number), params), now)
        while engine.wake_at(now) is not None:
            now += 1.0
            ends |= {event.request_id: event for event in engine.step(now) if isinstance(event, Finished)}
            engine.check_consistency()
    assert [ends[f"r{number}"].reason for number in range(3)] == [FinishReason.FAILED] + 2 * [
        FinishReason.LENGTH
    ]
    assert "out of memory" in ends["r0"].message


def test_penalties_count_the_tokens_that_count() -> None:
    """A row with a right draft and a wrong one: the token behind the wrong one is void."""
    first = greedy_of(2)
    penalized = {"presence_penalty": 0.01, "repetition_penalty": 1.01}
    outcomes = []
    for room in (1 << 30, 0):
        device = FakeDevice(room)
        runner, _ = make(device, lines=4, drafts=True)
        runner.capture()
        drafts = (first[1], (greedy_of(3)[2] + 1) % VOCAB, 3)
        plans = [
            StepPlan(0, (entry(0, PROMPT, **penalized),), (), (row(0, 0, 5, (3, 1, 4)),)),
            StepPlan(1, (), (), (Row(0, 5, 4, (), True, drafts),)),
        ]
        for plan in plans:
            runner.launch(plan, 0.0)
        tokens = [runner.collect().tokens[0] for _ in plans]
        assert len(tokens[1]) == 2
        outcomes.append((tokens, runner._sampling.counts[-1].tolist()))
        assert sum(count % IN_PROMPT for count in outcomes[-1][1]) == 3
        assert device.replays == (1 if room else 0)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("least", [BLOCK, 2 * BLOCK])
def test_rows_with_the_same_first_block_take_a_graph_that_reads_it_once(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is worth it: here they share one block."""
    for name in ("LEAST_SHARED", "LEAST_SPARED", "SHARED_TILE"):
        monkeypatch.setattr(shared_keys, name, least)
    runner, _ = make(FakeDevice(), lines=2)
    runner.capture()
    graphs = runner._graphs
    assert graphs is not None
    launch, used = graphs.launch, []

    def noted(variant: Variant, *rest: Any) -> None:
        used.append(variant.shares)
        launch(variant, *rest)

    monkeypatch.setattr(graphs, "launch", noted)
    other = (*PROMPT[:BLOCK], 30)
    plans = [
        StepPlan(0, (entry(0, PROMPT),), (), (row(0, 0, 5, (3, 1)),)),
        StepPlan(1, (entry(2, other, (3,)),), (), (row(2, 4, 1, (5,)), row(0, 5, 1))),
        StepPlan(2, (), (), (row(2, 5, 1), row(0, 6, 1))),
    ]
    for plan in plans:
        runner.launch(plan, 0.0)
    tokens = [runner.collect().tokens for _ in plans]
    assert [each[0][0] for each in tokens[1:]] == greedy(other, 2, VOCAB)
    assert [each[-1][0] for each in tokens] == greedy_of(3)
    assert used == [least == BLOCK] * 2


def prompts_in_two_chunks(runner: LocalRunner) -> list[tuple[tuple[int, ...], ...]]:
    """A prompt in two chunks beside a row that decodes: three, two, then one token of it and one of the other."""
    entries = (entry(0, PROMPT), entry(2, (8, 8), temperature=0.8, seed_=5))
    plans = [
        StepPlan(0, entries, (), (row(0, 0, 3, (3, 1), samples=False), row(2, 0, 2, (7,)))),
        StepPlan(1, (), (), (row(2, 2, 1), row(0, 3, 2))),
        StepPlan(2, (), (), (row(2, 3, 1), row(0, 5, 1))),
    ]
    for plan in plans:
        runner.launch(plan, 0.0)
    return [runner.collect().tokens for _ in plans]


@pytest.mark.parametrize(("tokens", "replays"), [(8, 3), (4, 2), (1, 1)])
def test_steps_with_short_prompts_are_replayed_up_to_a_size(tokens: int, replays: int) -> None:
    device = FakeDevice()
    runner, _ = make(device, lines=2, tokens=tokens)
    runner.capture()
    bare, _ = make(FakeDevice(room=0))
    bare.capture()
    assert prompts_in_two_chunks(runner) == prompts_in_two_chunks(bare)
    assert device.replays == replays


def test_a_prompt_behind_many_keys_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk takes two tiles, of which the second reads three keys again."""
    monkeypatch.setattr(steps, "MOST_KEYS_AGAIN", 2)
    device = FakeDevice()
    runner, _ = make(device, lines=2, tokens=8)
    runner.capture()
    assert prompts_in_two_chunks(runner)[0][0] == ()
    assert device.replays == 2
