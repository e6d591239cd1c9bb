"""``--kv-transfer-config``: a JSON object with vLLM's keys, checked key by key."""

from __future__ import annotations

import pytest

from headrace.config import ConfigError, options
from headrace.config.objects.kv_transfer import Address, KVTransferConfig, read_kv_transfer

LEAST = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}


def extra(**given: object) -> dict[str, object]:
    return LEAST | {"kv_connector_extra_config": given}


def test_defaults() -> None:
    config = read_kv_transfer("x", LEAST)
    assert config == KVTransferConfig("SharedMemoryConnector", "kv_both")
    assert config.produces
    assert config.consumes


def test_every_key_is_read() -> None:
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
        ({"kv_role": "kv_both"}, "kv_connector is missing"),
        ({"kv_connector": "SharedMemoryConnector"}, "kv_role is missing"),
        (LEAST | {"kv_rol": "x"}, "there is no key 'kv_rol'; did you mean kv_role"),
        (LEAST | {"kv_connector": "LMCacheConnectorV1"}, "expected SharedMemoryConnector or NixlConnector"),
        (LEAST | {"kv_role": "both"}, "expected kv_producer or kv_consumer or kv_both, got 'both'"),
        (LEAST | {"kv_rank": 0}, "kv_rank is not supported: servers are named by their addresses"),
        (LEAST | {"kv_ip": "0.0.0.0"}, "kv_ip: 0.0.0.0 is no address that a peer can connect to"),
        (LEAST | {"kv_port": 70_000}, "kv_port: expected a whole number from 0 to 65535"),
        (LEAST | {"kv_load_failure_policy": "fail"}, "kv_load_failure_policy: expected recompute"),
        (extra(peer="a:1"), "kv_connector_extra_config: there is no key 'peer'; did you mean peers"),
        (extra(peers=["a"]), r"peers\[0\]: expected HOST:PORT, got 'a'"),
        (extra(peers="a:1"), "peers: expected a list of HOST:PORT"),
        (extra(timeout_seconds=60), "timeout_seconds: expected seconds from 0.001 to 5"),
        (LEAST | {"kv_role": "kv_consumer"}, "a kv_consumer needs servers to pull from"),
        (extra(peers=["a:1"]) | {"kv_role": "kv_producer"}, "a kv_producer pulls from no peers"),
    ],
)
def test_what_is_refused(given: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options({"kv_transfer_config": given})


def test_the_option_is_kept_as_text() -> None:
    chosen = options({"kv_transfer_config": LEAST}).cache.kv_transfer_config
    assert chosen == '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}'
