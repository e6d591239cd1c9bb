"""Options whose values are JSON objects, checked key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import ConfigError, SchedulerOptions, options
from headrace.config.objects import (
    LOADED,
    METHODS,
    Address,
    KVEventsConfig,
    KVTransferConfig,
    SpeculativeConfig,
    read_kv_events,
    read_kv_transfer,
    read_speculation,
)
from headrace.wiring.drafting import PROPOSERS, make_drafter


def test_defaults_of_speculation() -> None:
    assert read_speculation("x", '{"method": "ngram"}') == SpeculativeConfig(("ngram",))


def test_every_key_of_speculation_is_read() -> None:
    given = {
        "method": ["suffix", "ngram", "suffix"],
        "num_speculative_tokens": 4,
        "adaptive": False,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 5,
        "suffix_max_bytes": "1MiB",
    }
    assert read_speculation("x", given) == SpeculativeConfig(("suffix", "ngram"), 4, False, 3, 5, 1 << 20)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("ngram", "expected a JSON object such as"),
        ("[1]", r"expected a JSON object such as .*, got \[1\]"),
        ("{}", "the key 'method' is missing: one of ngram"),
        (
            '{"method": "ngrams"}',
            "expected one of ngram, suffix, prediction, .*got 'ngrams'; did you mean ngram",
        ),
        ('{"method": []}', "or a list of them"),
        ('{"method": "mtp"}', "mtp: MTP layers are not supported, and no supported architecture has them"),
        ('{"method": ["ngram", "deepseek_mtp"]}', "deepseek_mtp: MTP layers are not supported"),
        ('{"method": "medusa", "model": "x"}', "medusa: EAGLE-3 heads are the only supported ones"),
        ('{"method": [3]}', "got 3"),
        ('{"method": "ngram", "num_speculative_token": 3}', "did you mean num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "a whole number from 1 to 64, got 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "a whole number from 1 to 64, got True"),
        ('{"method": "ngram", "adaptive": 1}', "expected true or false, got 1"),
        (
            '{"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}',
            "9 is above prompt_lookup_max 3",
        ),
        ('{"method": "draft_model"}', "method draft_model needs the key 'model'"),
        ('{"method": "eagle3"}', "method eagle3 needs the key 'model'"),
        (
            '{"method": ["eagle3", "draft_model"], "model": "x"}',
            "methods eagle3 and draft_model exclude each other",
        ),
        (
            '{"method": "eagle3", "model": "x", "quantization": "int8"}',
            "quantization needs the method draft_model$",
        ),
        ('{"method": "draft_model", "model": 3}', "model: expected text, got 3"),
        ('{"method": "ngram", "model": "x"}', "model needs the method draft_model"),
        (
            '{"method": "draft_model", "model": "x", "quantization": "int2"}',
            "one of int8, int4, w4a8, got 'int2'",
        ),
        ('{"method": "suffix", "suffix_max_bytes": "many"}', "suffix_max_bytes: expected a size"),
        (
            '{"method": "suffix", "suffix_max_bytes": -1}',
            "suffix_max_bytes: expected a size .* from 1 to 1024TiB",
        ),
    ],
)
def test_what_is_wrong_with_speculation_is_named(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        options({"speculative_config": given})
    assert str(caught.value).startswith("--speculative-config: ")


def test_it_is_given_as_text_as_an_object_and_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config:\n  method: ngram\n  adaptive: false\n")
    by_file = options({}, file).scheduler.speculative_config
    by_object = options({"speculative_config": {"adaptive": False, "method": "ngram"}}, keywords=True)
    by_text = options({"speculative_config": '{"method": "ngram", "adaptive": false}'})
    assert by_file == by_object.scheduler.speculative_config == by_text.scheduler.speculative_config
    assert options({"speculative_config": None}).scheduler.speculative_config is None


def test_there_is_a_proposer_for_every_method() -> None:
    assert {*PROPOSERS, *LOADED} == set(METHODS)  # those need weights: see `load_drafting`
    for method in METHODS:
        model = ', "model": "builtin-draft"' if method in LOADED else ""
        plans = SchedulerOptions(speculative_config=f'{{"method": "{method}"{model}}}')
        assert make_drafter(plans) is not None
    assert make_drafter(SchedulerOptions()) is None


def test_defaults_are_those_of_the_field() -> None:
    assert read_kv_events("x", "{}") == KVEventsConfig(
        True, "zmq", "tcp://*:5557", None, 10_000, 100_000, 100_000, ""
    )


def test_every_key_of_kv_events_is_read() -> None:
    given = {
        "enable_kv_cache_events": False,
        "publisher": "null",
        "endpoint": "ipc:///tmp/kv",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 5,
        "hwm": 6,
        "max_queue_size": 7,
        "topic": "kv@pod@model",
    }
    assert read_kv_events("x", given) == KVEventsConfig(*given.values())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("zmq", "expected a JSON object such as"),
        ({"endpont": "tcp://*:1"}, "there is no key 'endpont'; did you mean endpoint"),
        ({"endpoint": "*:5557"}, "endpoint: expected a ZeroMQ address such as"),
        ({"endpoint": 5557}, "endpoint: expected a ZeroMQ address such as .*, got 5557"),
        ({"replay_endpoint": "http://x"}, "replay_endpoint: expected a ZeroMQ address"),
        ({"publisher": "nats"}, "publisher: expected zmq, or null to publish nothing, got 'nats'"),
        ({"buffer_steps": 0}, "buffer_steps: expected a whole number from 1"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events: expected true or false, got 1"),
        ({"topic": 1}, "topic: expected text, got 1"),
    ],
)
def test_what_is_wrong_with_kv_events_is_named(given: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options({"kv_events_config": given})


LEAST = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}


def extra(**given: object) -> dict[str, object]:
    return LEAST | {"kv_connector_extra_config": given}


def test_defaults_of_kv_transfer() -> None:
    config = read_kv_transfer("x", LEAST)
    assert config == KVTransferConfig("SharedMemoryConnector", "kv_both")
    assert config.produces
    assert config.consumes


def test_every_key_of_kv_transfer_is_read() -> None:
    given = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_ip": "10.0.0.5",
        "kv_port": 5000,
        "engine_id": "prefill-0",
        "kv_buffer_size": 1 << 30,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"peers": ["10.0.0.6:5000", "[::1]:7"], "timeout_seconds": 2},
    }
    config = read_kv_transfer("x", given)
    assert config.peers == (Address("10.0.0.6", 5000), Address("::1", 7))
    assert (config.kv_ip, config.kv_port, config.engine_id) == ("10.0.0.5", 5000, "prefill-0")
    assert (config.kv_buffer_size, config.timeout_seconds) == (1 << 30, 2.0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("nixl", "expected a JSON object such as"),
        ({"kv_role": "kv_both"}, "the key 'kv_connector' is missing: one of Shared.*; for example"),
        ({"kv_connector": "SharedMemoryConnector"}, "the key 'kv_role' is missing"),
        (LEAST | {"kv_rol": "x"}, "there is no key 'kv_rol'; did you mean kv_role"),
        (
            LEAST | {"kv_connector": "LMCacheConnectorV1"},
            "expected one of SharedMemoryConnector, NixlConnector",
        ),
        (LEAST | {"kv_role": "both"}, "expected one of kv_producer, kv_consumer, kv_both, got 'both'"),
        (LEAST | {"kv_rank": 0}, "kv_rank is not supported: servers are named by their addresses"),
        (LEAST | {"kv_ip": "0.0.0.0"}, "kv_ip: 0.0.0.0 is no address that a peer can connect to"),
        (LEAST | {"kv_port": 70_000}, "kv_port: expected a whole number from 0 to 65535"),
        (LEAST | {"kv_load_failure_policy": "fail"}, "kv_load_failure_policy: expected one of recompute"),
        (extra(peer="a:1"), "kv_connector_extra_config: there is no key 'peer'; did you mean peers"),
        (extra(peers=["a"]), r"peers\[0\]: expected HOST:PORT, got 'a'"),
        (extra(peers="a:1"), "peers: expected a list of HOST:PORT"),
        (extra(timeout_seconds=60), "timeout_seconds: expected seconds from 0.001 to 5"),
        (LEAST | {"kv_role": "kv_consumer"}, "a kv_consumer needs servers to pull from"),
        (extra(peers=["a:1"]) | {"kv_role": "kv_producer"}, "a kv_producer pulls from no peers"),
    ],
)
def test_what_is_wrong_with_kv_transfer_is_named(given: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options({"kv_transfer_config": given})


def test_the_option_is_kept_as_text() -> None:
    chosen = options({"kv_transfer_config": LEAST}).cache.kv_transfer_config
    assert chosen == '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}'
