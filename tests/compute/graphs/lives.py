"""Random lives of an engine: arrivals, cancellations, preemption, drafts, overlap, by graphs of the fake device.

The decoder is the one without weights, whose logits depend on every position of the prefix as the pages hold it. So a
stale table, a wrong slot, a token of another step or padding that writes somewhere gives other tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Batch
from headrace.compute.graphs.body import Variant
from headrace.compute.graphs.steps import GraphSpec
from headrace.compute.runner import LocalRunner
from headrace.compute.sampling.choice import TokenChoice
from headrace.compute.sampling.penalties import Penalty, penalize
from headrace.core.drafting.proposal import Drafter, DraftRow
from headrace.core.engine import Engine
from headrace.core.events import Emitted, Event, Finished, Preempted, Verified
from headrace.core.knobs import Knobs
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.testing.hashing_runner import LyingDrafter
from tests.compute.fakes import BLOCK, FakeDecoder, FakeKV
from tests.compute.graphs.fake_device import FakeDevice, untraced
from tests.doubles.engines import plain_engine

VOCAB, MAX_LEN, END = 61, 40, 7
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class OpaqueDecoder(FakeDecoder):
    """The decoder without weights as kernels of a device: what is inside of them is not traced."""

    def __init__(self) -> None:
        super().__init__(VOCAB)

    def hidden(self, batch: Batch, kv: FakeKV) -> torch.Tensor:
        out = torch.empty(len(batch.logits_indices), VOCAB)
        with untraced():
            out.copy_(super().hidden(batch, kv))
            self.calls.clear()
        return out

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        with untraced():
            out.copy_(super().likeliest(logits))
        return out

    def penalize(self, logits: torch.Tensor, counts: torch.Tensor, penalty: Penalty) -> None:
        with untraced():
            penalize(logits, counts, Penalty(*(np.array(each) for each in penalty)))

    def choose(self, logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
        out = torch.empty(len(logits), dtype=torch.int64)
        with untraced():
            out.copy_(super().choose(logits, TokenChoice(*(np.array(each) for each in choice))))
        return out


class Shape(NamedTuple):
    """How an engine is built; None for ``device``: the simple engine."""

    seqs: int
    blocks: int
    batched_tokens: int
    overlap: int
    prefix_caching: bool
    lines: int
    room: int
    row_tokens: int = 3
    tokens: int = 8


class Act(NamedTuple):
    """What happens before a step: requests that arrive, and names of those that are cancelled."""

    arrive: tuple[Request, ...]
    cancel: tuple[str, ...]


class Outcome(NamedTuple):
    """Tokens and ends by request, and what happened on the way: ``graphs`` counts the replays of each."""

    tokens: dict[str, tuple[int, ...]]
    ends: dict[str, Finished]
    preempted: int
    accepted: int
    graphs: Counter[Variant]


def shape_of(rng: random.Random) -> Shape:
    seqs = rng.randint(1, 6)
    least = -(-MAX_LEN // BLOCK)
    return Shape(
        seqs=seqs,
        blocks=rng.randint(least, least + 6),
        batched_tokens=rng.choice([8, 16, 64]),
        overlap=rng.choice([0, 1, 1, 1, 2]),
        prefix_caching=rng.random() < 0.7,
        lines=rng.choice([seqs, 2 * seqs, 4 * seqs]),
        room=1 << 30 if rng.random() < 0.8 else rng.randint(0, 12),
        row_tokens=rng.randint(1, 4),
        tokens=rng.choice([1, 16, 32]),
    )


def _params(rng: random.Random) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.8, 1.3]),
        "max_tokens": rng.randint(1, 16),
        "ignore_eos": rng.random() < 0.5,
    }
    some = (
        (0.2, "top_k", rng.randint(1, 20)),
        (0.2, "top_p", rng.uniform(0.3, 1.0)),
        (0.1, "min_p", 0.05),
        (0.15, "presence_penalty", 1.1),
        (0.1, "repetition_penalty", 1.4),
        (0.1, "logprobs", rng.randint(0, 2)),
        (0.1, "bad_words", ((3,), (4, 5))),
        (0.1, "min_tokens", rng.randint(0, given["max_tokens"])),
    )
    given |= {name: value for chance, name, value in some if rng.random() < chance}
    return SamplingParams(**given)


def life(rng: random.Random) -> list[Act]:
    prefixes = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))) for _ in range(2)]
    acts, names = [], []
    for number in range(rng.randint(2, 8)):
        tokens = rng.choice(prefixes)[: rng.randint(0, 20)] + tuple(
            rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))
        )
        made = Request(
            f"r{number}",
            tokens,
            _params(rng),
            seed=rng.randrange(1 << 40),
            eos_token_ids=frozenset({END}),
        )
        names.append(made.id)
        victim = (rng.choice(names),) if rng.random() < 0.1 else ()
        acts.append(Act((made,), victim))
        acts += [Act((), ())] * rng.choice([0, 0, 0, 1, 3])
    return acts


def engine_of(
    shape: Shape, device: FakeDevice | None, drafter: Drafter | None
) -> tuple[Engine, LocalRunner, FakeKV]:
    """An engine over the fake decoder; with ``device`` by graphs, else the simple engine."""
    decoder, kv = OpaqueDecoder(), FakeKV(shape.blocks)
    spec = None
    if device is not None:
        spec = GraphSpec(
            device, shape.lines, drafter is not None, VOCAB, torch.float32, shape.row_tokens, shape.tokens
        )
    runner = LocalRunner(
        decoder,  # type: ignore[arg-type]
        kv,  # type: ignore[arg-type]
        vocab_size=VOCAB,
        max_num_seqs=shape.seqs,
        max_model_len=MAX_LEN,
        device=torch.device("cpu"),
        graphs=spec,
    )
    if device is not None:
        watch(device, runner)
        runner.capture()
    engine = plain_engine(
        runner,
        shape.blocks,
        BLOCK,
        knobs=Knobs(batched_tokens=shape.batched_tokens),
        overlap=shape.overlap if device else 0,
        max_num_seqs=shape.seqs,
        max_model_len=MAX_LEN,
        prefix_caching=shape.prefix_caching,
        drafter=drafter,
    )
    return engine, runner, kv


def watch(device: FakeDevice, runner: LocalRunner, weights: Sequence[torch.Tensor] = ()) -> None:
    """Tell ``device`` what the graphs of ``runner`` may read."""
    graphs, slots, sampler = runner._graphs, runner._slots, runner._sampling._sampler
    assert graphs is not None
    device.buffers = lambda: (*graphs._body.buffers(), *weights)
    device.outputs = lambda: (graphs._buffers.out, graphs._buffers.states)
    device.outside = lambda: (slots._host_tables, slots._blocks, sampler._features, sampler._numbers)


def run(
    acts: Sequence[Act],
    shape: Shape,
    device: FakeDevice | None = None,
    drafter: Drafter | None = None,
    prepare: Callable[[Engine, LocalRunner], None] = lambda engine, runner: None,
) -> Outcome:
    """Live one life to its end; the books are checked after each step."""
    engine, runner, _ = engine_of(shape, device, drafter)
    prepare(engine, runner)
    used: Counter[Variant] = Counter()
    if runner._graphs is not None:
        launch = runner._graphs.launch

        def counted(variant: Variant, *rest: Any) -> None:
            used.update((variant,))
            launch(variant, *rest)

        runner._graphs.launch = counted  # type: ignore[method-assign]
    seen: list[Event] = []
    now, left = 0.0, list(reversed(acts))
    while left or engine.wake_at(now) is not None:
        if left:
            act = left.pop()
            for request in act.arrive:
                engine.submit(request, now)
            for name in act.cancel:
                engine.cancel(name, FinishReason.CANCELLED, now)
        now += 1.0
        seen += engine.step(now)
        engine.check_consistency()
    runner.close()
    tokens: dict[str, tuple[int, ...]] = {}
    for event in seen:
        if isinstance(event, Emitted):
            tokens[event.request_id] = tokens.get(event.request_id, ()) + event.tokens
    return Outcome(
        tokens,
        {event.request_id: event for event in seen if isinstance(event, Finished)},
        sum(isinstance(event, Preempted) for event in seen),
        sum(event.accepted for event in seen if isinstance(event, Verified)),
        used,
    )


def compare(
    seed: int,
    prepare: Callable[[Engine, LocalRunner], None] = lambda engine, runner: None,
    *,
    traced: bool = True,
) -> Outcome:
    """One life by graphs and by the simple engine: the tokens must be the same. ``prepare`` may break the former.

    Raises:
        AssertionError: they are not, or a replay did what a graph cannot do.
    """
    rng = random.Random(seed)
    shape, acts = shape_of(rng), life(rng)
    plain = run(acts, shape)
    drafter = None
    if rng.random() < 0.5:

        def truth(draft_row: DraftRow, count: int) -> Sequence[int]:
            said = len(draft_row.tokens) - len(draft_row.request.tokens)
            return (*plain.tokens.get(draft_row.request.id, ()), *range(count))[said : said + count]

        drafter = LyingDrafter(truth, seed, VOCAB)
    graphed = run(acts, shape, FakeDevice(shape.room, traced), drafter, prepare)
    assert graphed.ends.keys() == plain.ends.keys(), f"life {seed}: other requests end"
    for name, end in plain.ends.items():
        mine, yours = graphed.tokens.get(name, ()), plain.tokens.get(name, ())
        least = min(len(mine), len(yours))
        assert mine[:least] == yours[:least], f"life {seed}, {name}: {mine} by graphs, {yours} without"
        if end.reason in WHOLE and graphed.ends[name].reason in WHOLE:
            assert (mine, end.reason) == (yours, graphed.ends[name].reason), f"life {seed}, {name}"
        assert graphed.ends[name].reason is not FinishReason.FAILED, graphed.ends[name].message
    return graphed
