from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from headrace.config import CacheOptions, ConfigError, SchedulerOptions, ServerOptions
from headrace.core.engine import Engine
from headrace.core.prediction.step_curve import StepCost
from headrace.core.request import Request, SamplingParams, Slo
from headrace.core.tenancy.tenants import ServiceClass
from headrace.lab.replay.exact import RecordedDrafts, Replay
from headrace.lab.replay.trace import Step, read_trace
from headrace.observe.recording import RecordedEngine
from headrace.testing.hashing_runner import HashingRunner
from headrace.wiring.engine import TierSizes, make_engine, make_knobs
from headrace.wiring.recording import make_engine_again, make_recorded_engine, open_recording

PLANS = SchedulerOptions(scheduling_policy="priority", max_num_seqs=3, max_num_batched_tokens=24)
CACHE = CacheOptions(block_size=8)


def recorded(path, plans=PLANS, cache=CACHE, **more):
    """A recorded engine's life, written to a file by the tape of a server."""
    tape = open_recording(ServerOptions(record_trace=str(path)))
    engine = make_recorded_engine(
        tape.tell,
        plans,
        cache,
        HashingRunner(20, 8, 3),
        num_blocks=20,
        max_model_len=64,
        knobs=make_knobs(plans, "cpu", 64),
        cost=StepCost(8.0, 300.0),
        overlap=1,
        **more,
    )
    for i in range(8):
        params = SamplingParams(max_tokens=12)
        engine.submit(
            Request(f"r{i}", tuple(range(i % 3, 30)), params, arrived=0.01 * i, priority=-i), 0.01 * i
        )
        engine.step(0.01 * i)
    now = 1.0
    while engine.wake_at(now) is not None:
        engine.step(now := now + 0.01)
    tape.close()
    return read_trace(path)


def test_what_is_not_recorded_is_the_plain_engine():
    assert open_recording(ServerOptions()) is None
    made = make_engine(
        PLANS,
        CACHE,
        HashingRunner(4, 8, 3),
        num_blocks=20,
        max_model_len=64,
        knobs=make_knobs(PLANS, "cpu", 64),
        cost=StepCost(),
        overlap=0,
    )
    assert type(made) is Engine
    assert not isinstance(made, RecordedEngine)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_engine_comes_back_from_its_recording(tmp_path, policy):
    plans = SchedulerOptions(scheduling_policy=policy, max_num_seqs=3)
    trace = recorded(tmp_path / "trace.jsonl", plans)
    replay = Replay(trace, make_engine_again)
    assert len(list(replay.scenes())) > 8
    assert replay.divergence is None


def test_tiers_are_restored_and_secrets_are_not_recorded(tmp_path):
    path = tmp_path / "trace.jsonl"
    cache = CacheOptions(block_size=8, kv_transfer_secret="not for others")
    trace = recorded(path, cache=cache, tiers=TierSizes(10, 0, 64, 1e9), peers=None)
    assert "not for others" not in path.read_text()
    replay = Replay(trace, make_engine_again)
    assert len(list(replay.scenes())) > 8
    assert replay.divergence is None


def test_classes_and_tenants_come_back_too(tmp_path):
    classes = (ServiceClass("gold", 0, 8.0, slo=Slo(0.5)), ServiceClass("default", 1, 2.0))
    more = {"classes": classes, "weights": MappingProxyType({"someone": 3.0})}
    trace = recorded(
        tmp_path / "trace.jsonl", SchedulerOptions(scheduling_policy="fair", max_num_seqs=3), **more
    )
    assert [each["name"] for each in trace.settings["classes"]] == ["gold", "default"]
    replay = Replay(trace, make_engine_again)
    assert list(replay.scenes())
    assert replay.divergence is None


def test_another_policy_diverges_from_the_recording(tmp_path):
    trace = recorded(tmp_path / "trace.jsonl")
    replay = Replay(
        trace,
        lambda settings, runner, drafter: make_engine_again(
            settings, runner, drafter, {"scheduling-policy": "fcfs"}
        ),
    )
    list(replay.scenes())
    assert replay.divergence is not None


def test_changes_reach_the_engine(tmp_path):
    settings = recorded(tmp_path / "trace.jsonl").settings
    changes = {"block-size": "4", "max_num_batched_tokens": "17", "overlap": "0", "max_model_len": "32"}
    engine = make_engine_again(settings, HashingRunner(40, 4, 3), RecordedDrafts(), changes)
    assert engine.scheduler.pool.block_size == 4
    assert engine.scheduler.pool.num_blocks == 40  # the same memory
    assert engine.knobs.batched_tokens == 17
    assert engine.scheduler.max_model_len == 32
    assert (
        make_engine_again(
            settings, HashingRunner(4, 4, 3), RecordedDrafts(), {"num_blocks": "7"}
        ).scheduler.pool.num_blocks
        == 7
    )


def test_blocks_that_are_asked_for_are_as_many_whatever_their_size(tmp_path):
    settings = recorded(tmp_path / "trace.jsonl").settings
    engine = make_engine_again(
        settings, HashingRunner(4, 4, 3), RecordedDrafts(), {"num-blocks": "40", "block-size": "4"}
    )
    assert engine.scheduler.pool.num_blocks == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "cannot change 'colour'; it can change scheduling_policy"),
        ({"max-num-seqs": "many"}, "max-num-seqs: expected a whole number"),
        ({"scheduling_policy": "random"}, "scheduling_policy: expected one of fair"),
        ({"max_num_batched_tokens": "1"}, "less than --max-num-seqs"),
        ({"num-blocks": "0"}, "num-blocks: expected a whole number of at least 1"),
        ({"max-model-len": "1"}, "max-model-len: expected a whole number of at least 2"),
        ({"tenants": "x.yaml"}, "cannot change 'tenants'"),  # read before the engine was made
        ({"kv-offload-bytes": "1000"}, "cannot change 'kv-offload-bytes'"),
        ({"gpu-memory-utilization": "0.5"}, "cannot change 'gpu-memory-utilization'"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(tmp_path, changes, message):
    settings = recorded(tmp_path / "trace.jsonl").settings
    with pytest.raises(ConfigError, match=message):
        make_engine_again(settings, HashingRunner(4, 4, 3), RecordedDrafts(), changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"colour": 1}, "settings that this version of Headrace does not have: colour"),
        ({"cache": {"colour": 1}}, "cache that this version of Headrace does not have: colour"),
        ({"num_blocks": "many"}, "num_blocks cannot be read"),
    ],
)
def test_settings_of_another_kind_are_refused(tmp_path, spoil, message):
    settings = {**recorded(tmp_path / "trace.jsonl").settings, **spoil}
    with pytest.raises(ConfigError, match=message):
        make_engine_again(settings, HashingRunner(4, 4, 3), RecordedDrafts())


@pytest.mark.parametrize("settings", [[], {}, {"cache": 5, "plans": {}}])
def test_settings_that_are_none_are_refused(settings):
    with pytest.raises(ConfigError, match="the trace"):
        make_engine_again(settings, HashingRunner(4, 4, 3), RecordedDrafts())


def test_a_recording_that_is_being_written_is_refused_at_the_start(tmp_path):
    options = ServerOptions(record_trace=str(tmp_path / "trace.jsonl"))
    tape = open_recording(options)
    with pytest.raises(ConfigError, match=r"--record-trace .*: another server writes to this file"):
        open_recording(options)
    tape.close()


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"--record-trace .*no such file"):
        open_recording(ServerOptions(record_trace=str(tmp_path / "no" / "trace.jsonl")))


def test_drafts_come_back_from_a_recording(tmp_path):
    plans = replace(PLANS, speculative_config='{"method": ["ngram", "suffix"], "adaptive": false}')
    trace = recorded(tmp_path / "trace.jsonl", plans)
    verified = [event for step in trace.of(Step) for event in step.events if event[0] == "Verified"]
    assert verified
    replay = Replay(trace, make_engine_again)
    assert list(replay.scenes())
    assert replay.divergence is None
