from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.compute.model.families import parse_config
from headrace.config import ConfigError, options
from headrace.llm import LLM
from headrace.wiring.loading.states import check_states
from tests.compute.model.configs import LLAMA

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
def test_others_are_accepted(states: bool, given: dict[str, Any]) -> None:
    check_states(options(given), STATEFUL if states else PLAIN)


def test_a_model_without_states_is_not_loaded_with_checkpoints() -> None:
    with pytest.raises(ConfigError, match="--state-cache-bytes"):
        LLM("builtin", max_model_len=64, state_cache_bytes="1MiB")
