from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.compute.model.families import parse_config
from headrace.config import ConfigError, SchedulerOptions, options
from headrace.core.knobs import Knobs
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.tenancy.tenants import CLASSES
from headrace.llm import LLM
from headrace.wiring.engine import check_states, has_patience, make_order
from tests.compute.model.configs import LLAMA
from tests.doubles.scenes import request


def test_the_order_of_the_queue_follows_its_knob():
    starts = LatestStarts(StepTimes(), LengthPredictor(1000), {each.name: each for each in CLASSES})
    knobs = Knobs()
    order = make_order(SchedulerOptions(), starts, lambda: knobs)
    long, short = request("long", 900, arrived=0.0), request("short", 9, arrived=0.5)
    assert order.rank(long, 1) < order.rank(short, 2)
    knobs = replace(knobs, queue_patience=4.0)
    assert order.rank(long, 1) > order.rank(short, 2)


def test_only_the_fair_queue_has_patience():
    assert has_patience(SchedulerOptions(queue_order="prefix"))
    assert not has_patience(SchedulerOptions(scheduling_policy="fcfs"))
    assert not has_patience(SchedulerOptions(queue_order="my_package:MyOrder"))


PLAIN = parse_config(LLAMA).shape
STATEFUL = replace(PLAIN, state_bytes=1 << 20)
TRANSFER = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'


@pytest.mark.parametrize(
    ("states", "given", "message"),
    [
        (False, {"state_cache_bytes": 1 << 20}, "--state-cache-bytes: LlamaForCausalLM has no recurrent"),
        (False, {"state_cache_interval": 0}, "--state-cache-interval: LlamaForCausalLM has no recurrent"),
        (
            True,
            {"state_cache_bytes": 1 << 20, "enable_prefix_caching": False},
            "--state-cache-bytes: prefix caching is disabled",
        ),
        (
            True,
            {
                "kv_transfer_config": TRANSFER,
                "kv_offload_bytes": 1 << 20,
            },
            "--kv-transfer-config: LlamaForCausalLM keeps recurrent states",
        ),
        (
            True,
            {"speculative_config": '{"method": "eagle3", "model": "x"}'},
            "--speculative-config: method eagle3 does not follow",
        ),
    ],
)
def test_options_that_the_model_cannot_follow_are_refused(
    states: bool, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_states(options(given), STATEFUL if states else PLAIN)


@pytest.mark.parametrize(
    ("states", "given"),
    [
        (False, {}),
        (False, {"state_cache_bytes": 0, "kv_offload_bytes": 1 << 20}),
        (True, {"state_cache_bytes": 1 << 20, "state_cache_interval": 64}),
        (True, {"enable_prefix_caching": False}),
        (True, {"kv_offload_bytes": 1 << 20, "speculative_config": '{"method": "ngram"}'}),
    ],
)
def test_options_that_the_model_can_follow_are_accepted(states: bool, given: dict[str, Any]) -> None:
    check_states(options(given), STATEFUL if states else PLAIN)


def test_a_model_without_states_is_not_loaded_with_checkpoints() -> None:
    with pytest.raises(ConfigError, match="--state-cache-bytes"):
        LLM("builtin", max_model_len=64, state_cache_bytes="1MiB")
