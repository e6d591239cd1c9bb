"""Ranks as processes: one that dies or stands still under load is noticed, and the model runs again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ModelOptions
from headrace.core.engine import Engine
from headrace.core.events import Emitted, EngineLost, Event, Preempted
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.ports import LOST_PREFIX
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.fleet import others
from headrace.fleet.others import Processes
from headrace.testing.engines import Record
from headrace.wiring import engine as engine_module
from headrace.wiring import model
from headrace.wiring.loading import computing
from tests.fleet.runs import answers, answers_of, load


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine a rank may be silent for long."""
    monkeypatch.setattr(others, "SILENT_SECONDS", 60.0)


@pytest.fixture(scope="module")
def started() -> list[Processes]:
    return []


@pytest.fixture(scope="module")
def loaded(
    folder: Path, started: list[Processes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[model.Loaded]:
    """Two ranks, one of them a process, over host memory and a disk."""
    disk = tmp_path_factory.mktemp("disk")
    more = {"kv_offload_path": str(disk), "kv_offload_bytes": 1 << 20, "kv_offload_disk_bytes": 1 << 20}

    def start(model: ModelOptions) -> Processes:
        started.append(Processes(model.tensor_parallel_size * model.pipeline_parallel_size))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computing, "open_others", start)
        patch.setattr(engine_module, "RestoreIfFaster", lambda *args: AlwaysRestore())
        loaded = load(folder, 2, **more)
    yield loaded
    model.close(loaded)


def test_processes_give_the_tokens_of_one(folder: Path, loaded: model.Loaded) -> None:
    assert answers(loaded) == answers_of(folder)
    assert len(loaded.ledger.other_ranks) == 1
    assert loaded.ledger.other_ranks[0].kv_bytes == loaded.ledger.kv_bytes
    assert any(line.startswith("rank 1 ") for line in loaded.ledger.describe())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_what_runs_when_a_rank_is_lost_is_computed_again(
    how: signal.Signals,
    folder: Path,
    loaded: model.Loaded,
    started: list[Processes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = loaded.engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = [Request(f"{how.name} {i}", (1, 2, 3, 4 + i), params) for i in range(8)]  # more than run at once
    whole, _ = _run(engine, [replace(each, id=f"whole {each.id}") for each in wanted])
    engine.reset_prefix_cache()

    def lose(tokens: int) -> None:
        if tokens == LOST_AFTER:
            os.kill(started[0].ids[0], how)
            monkeypatch.setattr(others, "SILENT_SECONDS", 5.0)

    texts, events = _run(engine, wanted, lose)
    monkeypatch.setattr(others, "SILENT_SECONDS", 60.0)
    assert {f"whole {name}": text for name, text in texts.items()} == whole
    (lost,) = [event for event in events if isinstance(event, EngineLost)]
    assert lost.message.startswith(LOST_PREFIX + "rank 1 ")
    assert 1 <= lost.recomputed <= 4
    assert lost.recomputed == sum(isinstance(each, Preempted) for each in events)
    assert not lost.failed
    engine.check_consistency()
    assert answers(loaded) == answers_of(folder)


LOST_AFTER = 12
"""Tokens before a rank is lost."""


def _run(
    engine: Engine, wanted: list[Request], each_token: Callable[[int], None] = lambda tokens: None
) -> tuple[dict[str, list[int]], list[Event]]:
    """The tokens of all requests, each of which must end once with its whole answer, and all events."""
    for request in wanted:
        engine.submit(request, time.monotonic())
    record, tokens = Record(), 0
    while len(record.ends) < len(wanted):
        events = engine.step(time.monotonic())
        record.fold(events)
        for event in events:
            if isinstance(event, Emitted):
                tokens += 1
                each_token(tokens)
    assert all([end.reason for end in ends] == [FinishReason.LENGTH] for ends in record.ends.values())
    return record.tokens, record.events


def test_a_process_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "_MAIN", "raise SystemExit(3)")
    ranks = Processes(2)
    with pytest.raises(others.RankFailed, match="rank 1 ended with exit code 3"):
        ranks.start()
    ranks.stop()


def test_ranks_end_with_rank_0(folder: Path) -> None:
    loaded = load(folder, 2)
    ids: list[Any] = loaded.leader._others.ids  # type: ignore[union-attr]
    model.close(loaded)
    with pytest.raises(ProcessLookupError):
        os.kill(ids[0], 0)
