"""Engine processes that end at random points of random loads: the texts are those of an undisturbed engine."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Emitted,
    EngineLost,
    Preempted,
    PreemptReason,
    PromptScored,
)
from headrace.core.plan import TokenLogprob
from headrace.core.ports import LOST_PREFIX
from headrace.core.recovery import MOST_LOSSES, MOST_LOSSES_OF_REQUEST
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.service import engine_process, open_requests
from headrace.service.open_requests import OpenRequests
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import expected_tokens, seed_of
from tests.doubles.engine_processes import Successors, read, running
from tests.doubles.services import request

pytestmark = pytest.mark.anyio


def load(seed: int) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for number in range(rng.randrange(4, 14)):
        prompt = (*range(rng.randrange(1, 12)), *(rng.randrange(50) for _ in range(rng.randrange(1, 8))))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 24),
            temperature=rng.choice([0.0, 1.0]),
        )
        made.append(Request(f"r{number}", prompt, params, seed=rng.randrange(100)))
    return made


async def outcome(service: Service, wanted: list[Request]):
    """For each request its tokens and its end."""
    answers = [service.open([each]) for each in wanted]
    found = {}
    for each, answer in zip(wanted, answers, strict=True):
        events = await read(answer)
        tokens = [token for event in events if isinstance(event, Emitted) for token in event.tokens]
        found[each.id] = tokens, events[-1]
        service.close(answer)
    service.count()
    return found


@pytest.mark.parametrize("seed", range(20))
async def test_texts_are_those_of_an_engine_that_nothing_ended(seed: int) -> None:
    rng = random.Random(seed + 1000)
    wanted = load(seed)
    successors = Successors(
        [rng.randrange(0, 16) for _ in range(rng.randrange(1, MOST_LOSSES_OF_REQUEST + 1))]
    )
    async with running(successors) as (service, process, seen):
        found = await outcome(service, wanted)
        for each in wanted:
            tokens, end = found[each.id]
            count = each.params.max_tokens
            assert tokens == expected_tokens(each.tokens, seed_of(each.params, each.seed), count, frozenset())
            assert (end.reason, end.output_tokens, end.prompt_tokens) == (
                FinishReason.LENGTH,
                count,
                len(each.tokens),
            )
        assert Counter(each.request_id for each in seen.of(Arrived)) == Counter(each.id for each in wanted)
        new = [each.request_id for each in seen.of(Admitted) if each.reason is AdmitReason.NEW]
        assert sorted(new) == sorted(each.id for each in wanted)
        lost = seen.of(EngineLost)
        preempted = [each for each in seen.of(Preempted) if each.reason is PreemptReason.LOST]
        assert sum(each.recomputed for each in lost) == len(preempted)
        assert not any(each.failed for each in lost)
        assert len(lost) <= len(successors.engines) - 1
        steps = [each.step for each in seen.steps]
        assert steps == sorted(set(steps)), "the numbers of steps went back"
        assert process.progress().steps >= len(steps)
        assert service.open_requests() == process.progress().open_requests == 0
        successors.engines[-1].check_consistency()
        assert not successors.engines[-1].scheduler.live


async def test_a_request_that_ends_every_engine_fails_and_the_engine_goes_on() -> None:
    poison = -7

    def make():
        engine, runner = hashing_engine()
        launch = runner.launch

        def fall(plan, now):
            if any(poison in entry.tokens for entry in plan.entries):
                raise ZeroDivisionError
            launch(plan, now)

        runner.launch = fall
        return engine

    successors = Successors(make=make)
    async with running(successors) as (service, _process, _seen):
        answer = service.open([request("a", 3, (1, poison))])
        end = (await read(answer))[-1]
        assert end.reason is FinishReason.FAILED
        assert end.message == f"{LOST_PREFIX}ZeroDivisionError: "
        found = await outcome(service, [request("b", 5)])
        assert found["b"][1].reason is FinishReason.LENGTH
        assert len(successors.engines) == MOST_LOSSES_OF_REQUEST + 2 <= MOST_LOSSES + 1
        assert service.health().well


async def test_after_too_many_losses_all_requests_fail(monkeypatch) -> None:
    monkeypatch.setattr(open_requests, "MOST_LOSSES_OF_REQUEST", MOST_LOSSES + 1)
    successors = Successors([0] * (MOST_LOSSES + 1))
    async with running(successors) as (service, process, _seen):
        found = await outcome(service, [request("a", 60), request("b", 60)])
        assert {end.message for _, end in found.values()} == {"the engine failed"}
        assert len(successors.engines) == MOST_LOSSES + 1
        assert service.health().why == "the engine failed"
        assert process.progress().failure == "its process ended by SIGKILL"
        later = await outcome(service, [request("c")])
        assert later["c"][1].reason is FinishReason.FAILED


async def test_another_model_in_its_place_ends_the_engine() -> None:
    async with running(Successors([1], accepted=0)) as (service, process, _seen):
        found = await outcome(service, [request("a", 60)])
        assert found["a"][1].message == "the engine failed"
        assert process.progress().failure == "another model"


async def test_while_an_engine_loads_requests_wait_cancellations_end_and_settings_last() -> None:
    gate = threading.Event()
    successors = Successors([4], gate=gate)
    async with running(successors) as (service, process, seen):
        await service.between_steps(lambda: process.ask("set_knobs", 1))
        answers = {name: service.open([request(name, 50)]) for name in ("a", "b")}
        while not process.progress().restarting:
            await asyncio.sleep(0.001)
        health = service.health()
        assert (health.well, health.ready) == (True, False)
        assert health.why == "the engine is being started again: its process ended by SIGKILL"
        assert health.progress.stalled_seconds == 0
        answers["c"] = service.open([request("c", 3)])
        question = asyncio.ensure_future(service.between_steps(lambda: process.ask("estimate_start", "c")))
        service.close(answers["a"])
        assert (await read(answers["a"]))[-1].reason is FinishReason.CANCELLED
        await asyncio.sleep(0)
        assert process.progress().open_requests == 2
        gate.set()
        assert await question is None
        for name, count in (("b", 50), ("c", 3)):
            assert (await read(answers[name]))[-1].output_tokens == count
        assert successors.asked[1][0] == "set_knobs"
        assert process.past_counts == (0,)
        assert service.health() == (True, True, "", process.progress())
        service.count()
        ends = Counter(each.request_id for each in seen.events if type(each).__name__ == "Finished")
        assert ends == Counter("abc")


async def test_a_server_may_stop_while_an_engine_loads(monkeypatch) -> None:
    monkeypatch.setattr(engine_process, "END_SECONDS", 0.1)
    gate = threading.Event()
    async with running(Successors([0], gate=gate)) as (service, process, _seen):
        service.open([request("a", 50)])
        while not process.progress().restarting:
            await asyncio.sleep(0.001)
        assert not service.stop()


async def test_a_stop_that_was_not_heard_is_not_repeated() -> None:
    """A sequence whose answer ended at a stop string is not computed again."""
    gate = threading.Event()
    successors = Successors([4], gate=gate)
    async with running(successors) as (service, process, _seen):
        answer = service.open([request("a", 50)])
        while not process.progress().restarting:
            await asyncio.sleep(0.001)
        service.stop_sequence(answer, 0)
        end = (await read(answer))[-1]
        assert end.reason is FinishReason.STOP
        assert 0 < end.output_tokens < 50
        gate.set()


def test_scores_of_a_prompt_are_reported_once():
    each = OpenRequests()
    each.add(request("a", 9, tuple(range(8))), sent=True)
    scores = tuple(TokenLogprob(number, -1.0, 1, ()) for number in range(1, 8))
    first = [Admitted("a", AdmitReason.NEW, 0, 8), PromptScored("a", 0, scores[:3])]
    assert each.take(first) == first
    each.lose("it ended", True, "")
    again = [PromptScored("a", 0, scores[:2]), PromptScored("a", 2, scores[2:])]
    assert each.take(again) == [PromptScored("a", 3, scores[3:])]


def test_what_was_answered_before_counts_once() -> None:
    each = OpenRequests()
    each.add(replace(request("a", 9), answered=(4,)), sent=True)
    each.take([Admitted("a", AdmitReason.NEW, 2, 4), Emitted("a", (5, 6))])
    assert [rest.answered for rest in each.send()] == [(4, 5, 6)]
    (end,) = each.fail("gone")
    assert (end.output_tokens, end.cached_tokens) == (3, 2)
