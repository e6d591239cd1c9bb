"""``--kv-events-config``: a JSON object, checked key by key."""

from __future__ import annotations

import pytest

from headrace.config import ConfigError, options
from headrace.config.objects.kv_events import KVEventsConfig, read_kv_events


def test_defaults_are_those_of_the_field() -> None:
    assert read_kv_events("x", "{}") == KVEventsConfig(
        True, "zmq", "tcp://*:5557", None, 10_000, 100_000, 100_000, ""
    )


def test_every_key_is_read() -> None:
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
        ({"endpoint": 5557}, "endpoint: expected a text, got 5557"),
        ({"replay_endpoint": "http://x"}, "replay_endpoint: expected a ZeroMQ address"),
        ({"publisher": "nats"}, "publisher: expected zmq, or null to publish nothing, got 'nats'"),
        ({"buffer_steps": 0}, "buffer_steps: expected a whole number from 1"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events: expected true or false, got 1"),
        ({"topic": 1}, "topic: expected a text, got 1"),
    ],
)
def test_what_is_wrong_is_named(given: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options({"kv_events_config": given})
