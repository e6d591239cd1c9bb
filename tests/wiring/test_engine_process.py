from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import ConfigError, options
from headrace.observe.log import set_level
from headrace.service.engine_process import EngineProcess, FromEngine
from headrace.service.packing import frame
from headrace.testing.engines import hashing_engine
from headrace.wiring import engine_process
from headrace.wiring.controls import LocalControls, RemoteControls, answer
from headrace.wiring.engine_process import check_engine_process, received_description
from headrace.wiring.loading.images import NO_IMAGES

CONNECTOR = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'


def test_options_of_one_process_and_two_go_together():
    check_engine_process(options({"model": "builtin", "response_cache": ["memory"], "max_num_seqs": 4}))
    check_engine_process(
        options(
            {"model": "builtin", "embedding_model": "builtin", "rerank_model": "some/model", "tuner": "on"}
        )
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
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


def test_files_are_closed_before_the_server_may_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    loaded = SimpleNamespace(
        controls=SimpleNamespace(counts=None),
        adapters=None,
        engine=None,
        runner=SimpleNamespace(interrupt=None),
        images=NO_IMAGES,
        decoder=SimpleNamespace(device=None),
        close=lambda halted: done.append("saved") or "3 blocks",
    )
    host = SimpleNamespace(run=lambda: True, closed=lambda saved: done.append(f"reported {saved}"))
    recording, published = (SimpleNamespace(tell=None, close=lambda n=name: done.append(n)) for name in "ab")
    made: dict[str, Any] = {
        "open_recording": lambda options: recording,
        "load": lambda options, tell: loaded,
        "open_kv_events": lambda loaded, options: published,
        "warm_up": lambda loaded: None,
        "EngineHost": lambda *parts: host,
        "_description": lambda loaded, models: None,
        "packed": lambda hint, value: None,
    }
    for name, value in made.items():
        monkeypatch.setattr(engine_process, name, value)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine_process.run(theirs, 0, options({"model": "builtin"}))
    assert done == ["saved", "a", "b", "reported 3 blocks"]


def test_the_log_level_is_that_of_the_process_of_the_engine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    controls = LocalControls(hashing_engine()[0], lambda: None, SimpleNamespace(sleep=None, wake_up=None))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = EngineProcess(ours, None)
        process.counts = None
        monkeypatch.setattr(process, "ask", lambda name, *given: answer(controls, name, given))
        monkeypatch.setattr(RemoteControls, "counts", SimpleNamespace(outputs=None))
        logger = logging.getLogger("headrace")
        before = logging.getLevelName(logger.level).lower()
        try:
            RemoteControls(process, None, 1, False).set_log_level("error")
            assert logger.level == logging.ERROR
        finally:
            set_level(before if before != "notset" else "info")
