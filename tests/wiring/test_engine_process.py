from __future__ import annotations

import socket

import pytest

from headrace.config import ConfigError, options
from headrace.service.engine_process import FromEngine
from headrace.service.packing import frame
from headrace.wiring.engine_process import check_engine_process, received_description

CONNECTOR = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'


def test_options_of_one_process_and_two_go_together():
    check_engine_process(options({"model": "builtin", "response_cache": ["memory"], "max_num_seqs": 4}))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tuner": "advise"}, "--tuner advise"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"embedding_model": "builtin"}, "--embedding-model"),
        ({"rerank_model": "some/model"}, "--rerank-model"),
        ({"kv_transfer_config": CONNECTOR}, "--kv-transfer-config"),
        ({"runner": "pooling"}, "a model for embeddings"),
    ],
)
def test_options_that_need_one_process_are_refused_by_name(given, named):
    with pytest.raises(ConfigError, match=f"--engine-process: {named}"):
        check_engine_process(options({"model": "builtin", **given}))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (frame((FromEngine.REFUSED, "--max-model-len 9: too long")), "--max-model-len 9: too long"),
        (frame((FromEngine.REFUSED, "a"))[:5], "--engine-process: the engine's process has ended"),
        (b"", "--engine-process: the engine's process has ended"),
    ],
)
def test_what_the_process_refuses_or_its_end_is_the_error_of_the_start(sent, message):
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(sent)
        with pytest.raises(ConfigError, match=message):
            received_description(ours)
