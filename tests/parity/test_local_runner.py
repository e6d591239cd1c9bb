"""Two ways, one answer, through everything that computes: core, runner, sampler, decoder, paged attention.

Each request's tokens are those it gets alone, whole and undisturbed, however it is chunked, batched, preempted,
overlapped or served from shared blocks.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.compute.batch import StepInterrupt
from headrace.compute.blockfile import BlockFile
from headrace.compute.kernels import select
from headrace.compute.model.decoder import Decoder
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.weights import dummy_weights
from headrace.compute.mover import Mover
from headrace.compute.runner import LocalRunner
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Event,
    Finished,
    Moved,
    MoveReason,
    Preempted,
    PromptScored,
    TransferFailed,
)
from headrace.core.knobs import Knobs
from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.memory.lower_tier import LowerTier
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.memory.tiers import LowerTiers
from headrace.core.plan import Tier
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from tests.doubles.engines import plain_engine
from tests.doubles.scenes import texts
from tests.parity.drafted_runs import BLOCK, CONFIG, DEVICE, MAX_LEN, SEQS

DISK_BLOCKS = 300
VOCAB = 211


@functools.cache
def decoder() -> Decoder:
    spec = parse_config(CONFIG | {"vocab_size": VOCAB})
    weights = dummy_weights(spec, torch.float32, DEVICE, 4)
    weights.head.mul_(12)  # far from uniform: rounding in a differently shaped batch must not decide a token
    return Decoder(spec, weights, select("torch", DEVICE), MAX_LEN)


def requests() -> list[Request]:
    shared = tuple((7 * i + 3) % 211 for i in range(18))
    made: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (shared, {"temperature": 0.0}),
        ((*shared, 5), {"temperature": 0.9, "top_k": 40}),
        (shared[:11], {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2}),
        ((*shared, 5, 9), {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.2}),
        (tuple(range(50, 90)), {"temperature": 0.7, "min_p": 0.02, "bad_words": ((17,), (3, 4))}),
        ((1,), {"temperature": 1.0, "logprobs": 2}),
        ((2, 4, 8), {"temperature": 0.0, "logit_bias": ((9, 1.5),), "min_tokens": 5}),
        (shared, {"temperature": 1.0}),
        ((*shared[:15], 1, 1), {"temperature": 0.0, "allowed_token_ids": tuple(range(0, 211, 2))}),
        (tuple(range(100, 131)), {"temperature": 0.0, "prompt_logprobs": 1}),
    ]
    return [
        Request(
            f"r{index}",
            tokens,
            SamplingParams(max_tokens=14 + index, **params),
            seed=1000 + index,
            eos_token_ids=frozenset({9}),
        )
        for index, (tokens, params) in enumerate(made)
    ]


def run(
    todo: list[Request],
    *,
    blocks: int = 200,
    batched_tokens: int = 512,
    overlap: int = 0,
    background: bool = False,
    prefix_caching: bool = True,
    host_blocks: int = 0,
    folder: Path | None = None,
    interrupt: StepInterrupt | None = None,
) -> list[Event]:
    kv = PagedKV(decoder().spec.shape, blocks, BLOCK, torch.float32, DEVICE)
    size = kv.nbytes // blocks
    disk = BlockFile(folder / "blocks", DISK_BLOCKS, size) if folder else None
    runner = LocalRunner(
        decoder(),
        kv,
        vocab_size=VOCAB,
        max_num_seqs=SEQS,
        max_model_len=MAX_LEN,
        device=DEVICE,
        background=background,
        breakable=interrupt is not None,
        mover=Mover(kv, host_blocks, disk) if host_blocks else None,
    )
    if interrupt is not None:
        runner.interrupt = interrupt
        todo = [replace(request, service_class="background") for request in todo]
    events: list[Event] = []
    lower = LowerTiers(
        LowerTier(Tier.HOST, host_blocks, LeastRecentlyUsed()),
        LowerTier(Tier.DISK, DISK_BLOCKS, LeastRecentlyUsed()) if disk else None,
        AlwaysRestore(),
        block_size=BLOCK,
        block_bytes=size,
        emit=events.append,
    )
    engine = plain_engine(
        runner,
        blocks,
        BLOCK,
        events=events,
        lower=lower if host_blocks else None,
        queue=None if interrupt is None else FairQueue(ShareLedger(CLASSES, {}), TenantQueue),
        knobs=Knobs(batched_tokens=batched_tokens),
        overlap=overlap,
        max_num_seqs=SEQS,
        max_model_len=MAX_LEN,
        prefix_caching=prefix_caching,
    )
    for request in todo:
        engine.submit(request, 0.0)
    seen: list[Event] = []
    for step in range(2000):
        seen.extend(engine.step(float(step)))
        if sum(isinstance(event, Finished) for event in seen) == len(todo):
            break
    while engine.wake_at(0.0) is not None:  # collect what was still in flight
        seen.extend(engine.step(3000.0))
    engine.check_consistency()
    runner.close()
    finished = [event for event in seen if isinstance(event, Finished)]
    assert sorted(event.request_id for event in finished) == sorted(request.id for request in todo)
    assert all(event.reason in (FinishReason.STOP, FinishReason.LENGTH) for event in finished)
    return seen


@functools.cache
def alone() -> dict[str, list[int]]:
    return {id_: text for request in requests() for id_, text in texts(run([request])).items()}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"prefix_caching": False},
        {"batched_tokens": 7},
        {"overlap": 1},
        {"overlap": 1, "background": True},
        {"overlap": 1, "background": True, "batched_tokens": 9, "blocks": 26},
        {"blocks": 26},
        {"blocks": 26, "prefix_caching": False, "overlap": 1},
    ],
    ids=str,
)
def test_each_request_gets_what_it_gets_alone(how: dict[str, Any]) -> None:
    events = run(requests(), **how)
    assert texts(events) == alone()
    if how.get("blocks", 200) < 40:
        assert any(isinstance(event, Preempted) for event in events)
    if how.get("prefix_caching", True):
        assert any(isinstance(event, Admitted) and event.cached_tokens for event in events)


class OftenRung(StepInterrupt):
    """Is heard in the middle of most steps, now before one layer and now before another."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = 0
        self._chance = random.Random(0)

    def is_set(self) -> bool:
        heard = self._chance.random() < 0.4
        self.heard += heard
        return heard


@pytest.mark.parametrize("how", [{}, {"batched_tokens": 7}, {"blocks": 26}], ids=str)
def test_each_request_gets_what_it_gets_alone_though_steps_are_broken_off(how: dict[str, Any]) -> None:
    interrupt = OftenRung()
    assert texts(run(requests(), interrupt=interrupt, **how)) == alone()
    assert interrupt.heard > 20


@pytest.mark.parametrize("how", [{}, {"overlap": 1}, {"overlap": 1, "background": True}], ids=str)
@pytest.mark.parametrize("host_blocks", [5, 100])
@pytest.mark.parametrize("disk", [False, True])
def test_each_request_gets_what_it_gets_alone_over_tiers(
    how: dict[str, Any], host_blocks: int, disk: bool, tmp_path: Path
) -> None:
    """Twice the same requests over a pool too small for them, so that what comes again has been below meanwhile."""
    again = [replace(request, id=f"{request.id}-again") for request in requests()]
    folder = tmp_path if disk else None
    events = run(requests() + again, blocks=26, host_blocks=host_blocks, folder=folder, **how)
    made = texts(events)
    assert {id_: made[id_] for id_ in alone()} == alone()
    assert {id_: made[f"{id_}-again"] for id_ in alone()} == alone()
    reasons = {event.reason for event in events if isinstance(event, Moved)}
    assert reasons >= {MoveReason.EVICTED, MoveReason.RESTORED}
    assert (MoveReason.KEPT in reasons) == disk
    assert not any(isinstance(event, TransferFailed) for event in events)


def test_the_scene_is_worth_comparing() -> None:
    made = alone()
    assert len({tuple(text) for text in made.values()}) == len(made)
    assert all(len(set(text)) > 3 for text in made.values() if len(text) > 8)
    resumed = [event for event in run(requests(), blocks=26) if isinstance(event, Admitted)]
    assert any(event.reason == AdmitReason.RESUMED for event in resumed)


@pytest.mark.parametrize("how", [{}, {"batched_tokens": 7}, {"overlap": 1, "background": True}], ids=str)
def test_prompts_are_scored_the_same_whole_and_chunked(how: dict[str, Any]) -> None:
    scored = requests()[9]

    def scores(events: list[Event]) -> list[tuple[int, int]]:
        mine = [e for e in events if isinstance(e, PromptScored) and e.request_id == scored.id]
        assert [e.start for e in mine] == sorted(e.start for e in mine)
        return [(score.token, score.rank) for e in mine for score in e.logprobs]

    expected = scores(run([scored]))
    assert [token for token, _ in expected] == list(scored.tokens[1:])
    assert scores(run(requests(), **how)) == expected


def test_one_runner_serves_many_generations_of_sequences() -> None:
    """Slots, blocks and lanes of counts are taken again and again by other requests."""
    many = [
        Request(
            f"{request.id}-{turn}",
            request.tokens,
            request.params,
            0.0,
            seed=request.seed,
            eos_token_ids=request.eos_token_ids,
        )
        for turn in range(3)
        for request in (requests() if turn % 2 else reversed(requests()))
    ]
    made = texts(run(many, blocks=40, overlap=1))
    assert made == {f"{id_}-{turn}": text for turn in range(3) for id_, text in alone().items()}
