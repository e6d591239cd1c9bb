from __future__ import annotations

import pytest

from headrace.config import ConfigError, options
from headrace.wiring.front_ends import Ports, check_front_ends

CONNECTOR = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"kv_transfer_config": CONNECTOR}, "--kv-transfer-config"),
        ({"history_file": "history.db"}, "--history-file"),
        ({"otlp_traces_endpoint": "http://localhost:4318"}, "--otlp-traces-endpoint"),
        ({"runner": "pooling"}, "a model for embeddings"),
    ],
)
def test_options_that_need_one_front_end_are_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=f"--api-server-count: {named}"):
        check_front_ends(options({"model": "builtin", "api_server_count": 2, **given}))


def test_all_front_ends_have_sockets_at_one_port():
    ports = Ports(options({"model": "builtin", "port": 0}).server)
    made = [each for _ in range(3) for each in ports.sockets()]
    try:
        assert {each.getsockname()[1] for each in made} == {int(ports.url.rpartition(":")[2])}
    finally:
        for each in made:
            each.close()
        ports.close()
