"""The class that Dynamo drives, against the real package."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from tests.fleet.dynamo.workers import BLOCK_SIZE, body, collected, make_answering

pytest.importorskip("dynamo.common.backend", reason="the extra 'dynamo' is not installed")

from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from headrace.config import ConfigError
from headrace.fleet.dynamo.__main__ import Backend, read_args
from headrace.fleet.dynamo.backend import Parts


class Context:
    """What the backend uses of Dynamo's context."""

    def __init__(self, name: str = "a") -> None:
        self._name = name

    def id(self) -> str:
        return self._name


class Publisher:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def publish(self, rank: int, snapshot: Any) -> None:
        self.seen.append((rank, snapshot))


class EngineMetrics:
    """Dynamo's handle of a worker's metrics."""

    auto_labels = (("worker_id", "7"),)

    def register_prometheus_expfmt_callback(self, text: Any) -> None:
        self.text = text

    def register_prometheus_typed_callback(self, typed: Any) -> None:
        self.typed = typed


def made(closed: list[str]) -> Backend:
    def open_parts() -> Parts:
        page = MetricsPage()
        parts = Parts(
            answering=make_answering(),
            name="named",
            source="folder",
            max_num_seqs=4,
            max_num_batched_tokens=64,
            metrics=page,
            kv_endpoint="tcp://127.0.0.1:1",
            drain_seconds=30.0,
            close=lambda: closed.append("closed") or "",
        )
        parts.answering.service.watch(Metrics(page))
        return parts

    return Backend(open_parts)


def test_a_worker_lives_from_start_to_cleanup() -> None:
    async def run() -> None:
        closed: list[str] = []
        backend, publisher, metrics = made(closed), Publisher(), EngineMetrics()
        with pytest.raises(EngineShutdown):
            await collected(backend.generate(body(), Context()))
        config = await backend.start(1)
        assert (config.model, config.served_model_name) == ("folder", "named")
        assert config.llm.kv_cache_block_size == BLOCK_SIZE
        assert config.llm.context_length == 200
        assert [each.endpoint for each in await backend.kv_event_sources()] == ["tcp://127.0.0.1:1"]
        backend.attach_snapshot_publisher(publisher)
        await backend.register_prometheus(metrics)
        for name in "ab":
            tokens, _ = await collected(backend.generate(body(*range(1, 18)), Context(name)))
            assert len(tokens) == 5
        await backend.cleanup()
        await backend.cleanup()
        assert closed == ["closed"]
        rank, last = publisher.seen[-1]
        assert rank == 0
        assert last.kv_total_blocks > 0
        assert 0.4 < last.kv_cache_hit_rate < 0.5, "16 of the second prompt's 17 tokens"
        assert re.search(r'headrace:generation_tokens_total\{.*worker_id="7".*\} 10', metrics.text())
        with pytest.raises(EngineShutdown):
            await collected(backend.generate(body(), Context()))

    asyncio.run(run())


def test_errors_have_dynamos_types() -> None:
    async def run() -> None:
        backend = made([])
        await backend.start(1)
        with pytest.raises(InvalidArgument, match="token id 1000"):
            await collected(backend.generate(body(1000), Context()))
        seen = []
        async for chunk in backend.generate(body(max_tokens=190), Context()):
            seen.append(chunk)
            await backend.abort(Context())
        assert seen[-1]["finish_reason"] == "cancelled"
        await backend.cleanup()

    asyncio.run(run())


def test_the_probe_of_an_idle_worker_is_a_request_that_it_can_answer() -> None:
    async def run() -> None:
        backend = made([])
        await backend.start(1)
        tokens, _ = await collected(backend.generate(await backend.health_check_payload(), Context()))
        assert len(tokens) == 1
        await backend.cleanup()

    asyncio.run(run())


def test_the_command_line_has_dynamos_options_and_ours() -> None:
    given = ("builtin", "--max-num-seqs", "3", "--namespace", "blue", "--discovery-backend", "file")
    runtime, options = read_args(given)
    assert (runtime.namespace, runtime.component, runtime.endpoint) == ("blue", "backend", "generate")
    assert runtime.discovery_backend == "file"
    assert (options.model.model, options.scheduler.max_num_seqs) == ("builtin", 3)
    _, worker = asyncio.run(Backend.from_args(list(given)))
    assert worker.served_model_name == "builtin"
    assert worker.model_name.endswith("target"), "the folder from which the frontend reads the tokenizer"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--max-num-seqs", "0"), "max-num-seqs"),
        (("--usage-file", "x.db"), "--usage-file is an option of headrace serve"),
    ],
)
def test_an_option_that_cannot_work_is_named(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_args(("builtin", *given))


def test_help_lists_dynamos_options_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_args(["--help-all"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "--discovery-backend" in shown
    assert "--max-num-batched-tokens" in shown
