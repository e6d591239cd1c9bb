from __future__ import annotations

import json

import pytest

from headrace.core.events import (
    Admitted,
    DraftingFailed,
    Evicted,
    EvictReason,
    Finished,
    Preempted,
    Skipped,
    Verified,
)
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler.scheduler import Stalled
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.lab.replay.exact import Replay
from headrace.lab.replay.trace import read_trace
from headrace.observe.trace_file import Begun
from headrace.testing.engines import hashing_engine
from tests.lab.replay.recorded import record_life, recorded, write

SEEDS = 40


def test_random_lives_are_lived_again_event_by_event(tmp_path, monkeypatch):
    reported, broken_off, accepted = set(), 0, 0
    for seed in range(SEEDS):
        path = tmp_path / f"{seed}.jsonl"
        record, compose = record_life(seed, path, monkeypatch)
        broken_off += path.read_text().count('"broken_off": true')
        replay = Replay(read_trace(path), compose)
        events = [event for scene in replay.scenes() for event in scene.events]
        assert replay.divergence is None, f"seed {seed}: {replay.divergence}"
        shapes = [(type(event), getattr(event, "request_id", None)) for event in events]
        assert shapes == [(type(event), getattr(event, "request_id", None)) for event in record.events]
        accepted += sum(event.accepted for event in events if isinstance(event, Verified))
        reported |= {(type(event), getattr(event, "reason", None)) for event in events}
        reported |= {("shared", event.cached_tokens > 0) for event in events if isinstance(event, Admitted)}
    assert {kind for kind, _ in reported} >= {Admitted, Evicted, Preempted, Skipped, Finished, DraftingFailed}
    assert accepted > SEEDS
    assert {(Finished, reason) for reason in FinishReason} <= reported
    assert broken_off
    assert {("shared", True), (Evicted, EvictReason.RESET)} <= reported


def test_a_changed_history_is_reported_by_its_first_difference(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    _, compose = record_life(3, path, monkeypatch)
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        reported = json.loads(line)
        admitted = [event for event in reported.get("events", []) if event[0] == "Admitted"]
        if admitted:
            admitted[0][1]["known_tokens"] += 1
            lines[number - 1] = json.dumps(reported)
            break
    path.write_text("\n".join(lines) + "\n")
    replay = Replay(read_trace(path), compose)
    last = list(replay.scenes())[-1]
    assert replay.divergence.line == last.line == number
    assert replay.divergence.recorded[1]["known_tokens"] == replay.divergence.replayed[1]["known_tokens"] + 1


def deadlocked(path):
    """An engine whose queue gives nobody out, although nothing runs: a bug, as it would be recorded."""

    class Sticky(FairQueue):
        def pop(self, now):
            return None

    def stuck():
        return hashing_engine(queue=Sticky(ShareLedger(CLASSES, {}), TenantQueue))[0]

    now = 1.0
    moments = [Begun("test", {})]
    engine = recorded(stuck(), moments.append)
    engine.submit(Request("stuck", (1, 2, 3), SamplingParams(max_tokens=2), arrived=0.5), now)
    with pytest.raises(Stalled):
        engine.step(now)
    write(path, moments)
    return lambda settings, runner, drafter: stuck()  # no step ever reaches a runner


def test_a_recorded_deadlock_shows_which_requests_wait_and_why(tmp_path):
    path = tmp_path / "trace.jsonl"
    compose = deadlocked(path)
    (scene,) = Replay(read_trace(path), compose).scenes()
    assert scene.error == scene.recorded_error == "Stalled: 0 running, 1 waiting, nothing planned"
    ((request_id, since, reason),) = scene.waiting
    assert (request_id, since, reason) == ("stuck", 1.0, "arrived")
    assert scene.blocks_held == 0


def test_what_only_the_device_did_is_not_laid_to_the_core(tmp_path):
    moments = [Begun("test", {})]
    engine, runner = hashing_engine()
    engine = recorded(engine, moments.append)
    engine.submit(Request("r", (1, 2, 3), SamplingParams(max_tokens=2)), 0.0)
    runner.pages.clear()  # the "device" is gone
    with pytest.raises(IndexError):
        engine.step(0.1)
    write(tmp_path / "trace.jsonl", moments)

    def compose(settings, runner, drafter):
        engine, _ = hashing_engine()
        engine.runner = runner
        return engine

    (scene,) = Replay(read_trace(tmp_path / "trace.jsonl"), compose).scenes()
    assert scene.recorded_error.startswith("IndexError")
    assert not scene.error
    assert scene.rows[0].request_id == "r"


def test_an_answer_that_was_begun_elsewhere_is_continued(tmp_path):
    moments = [Begun("test", {})]
    plain, _ = hashing_engine()
    engine = recorded(plain, moments.append)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    engine.submit(Request("r", tuple(range(9)), params, answered=(11, 12)), 0.0)
    engine.submit(Request("whole", (1, 2), params, answered=(3,) * 6), 0.0)
    for now in range(6):
        engine.step(float(now))
    path = tmp_path / "trace.jsonl"
    write(path, moments)

    def compose(settings, runner, drafter):
        again, _ = hashing_engine()
        again.runner = runner
        return again

    trace = read_trace(path)
    replay = Replay(trace, compose)
    assert [scene.step for scene in replay.scenes()] == list(range(6))
    assert replay.divergence is None
    assert len(trace.answers["r"].tokens) == len(trace.answers["whole"].tokens) == 6
    assert trace.answers["r"].reason is FinishReason.LENGTH
