"""Ranks as processes: one that dies or stands still under load is noticed, and the model runs again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ModelOptions
from headrace.core.events import Emitted, Finished
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.ports import LOST_PREFIX
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.fleet import others
from headrace.fleet.others import Processes
from headrace.wiring import engine as engine_module
from headrace.wiring import model
from headrace.wiring.loading import native
from tests.fleet.runs import answers, answers_of, load
from tests.oracle.families import CASES


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine a rank may be silent for long."""
    monkeypatch.setattr(others, "SILENT_SECONDS", 60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    CASES["llama"].build(folder)
    return folder


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
        patch.setattr(native, "open_others", start)
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
def test_a_lost_rank_fails_what_runs_and_nothing_else(
    how: signal.Signals,
    folder: Path,
    loaded: model.Loaded,
    started: list[Processes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = loaded.engine
    for i in range(8):  # more than run at once
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.submit(Request(f"{how.name} {i}", (1, 2, 3, 4 + i), params), time.monotonic())
    ended: dict[str, Finished] = {}
    emitted = 0
    while len(ended) < 8:
        for event in engine.step(time.monotonic()):
            emitted += isinstance(event, Emitted)
            if isinstance(event, Finished):
                assert event.request_id not in ended
                ended[event.request_id] = event
        if emitted >= 12 and not ended:
            os.kill(started[0].ids[0], how)
            monkeypatch.setattr(others, "SILENT_SECONDS", 5.0)
            emitted = -1000
        if ended:
            monkeypatch.setattr(others, "SILENT_SECONDS", 60.0)
    failed = [event for event in ended.values() if event.reason is FinishReason.FAILED]
    assert 1 <= len(failed) <= 4
    assert all(event.message.startswith(LOST_PREFIX + "rank 1 ") for event in failed)
    assert all(event.reason is FinishReason.LENGTH for event in ended.values() if event not in failed)
    engine.check_consistency()
    assert answers(loaded) == answers_of(folder)


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
