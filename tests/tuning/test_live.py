"""The task that runs experiments: what it changes, what it writes, and what a broken file does."""

import asyncio
import json
import logging
import os
import socket
import threading

import pytest

from headrace.core.prediction.step_curve import StepCurve
from headrace.core.tenancy.gate import Limits
from headrace.service.service import Service as EngineService
from headrace.testing.engines import hashing_engine
from headrace.tuning import live as module
from headrace.tuning.evaluator import NotEvaluated
from headrace.tuning.live import LiveTuning, curve_reader
from tests.doubles.engine_processes import house


class Change:
    setting, value, why = "x", 2, "experiment e: treatment"


class EngineTuning:
    """Wants one change at once, then nothing."""

    def __init__(self):
        self.changes = [Change()]
        self.watchers = ()
        self.experiments = Experiments()

    def tick(self, now):
        return self.changes.pop() if self.changes else None

    def due(self):
        return float("inf")


class Experiments:
    def __init__(self):
        self.restored = None
        self.started = []

    def stored(self, now):
        return json.dumps([{"id": "e", "started": len(self.started)}])

    def restore(self, stored, now):
        self.restored = stored
        return ["experiment e stopped: test"]

    def start(self, body, now):
        self.started.append(body)
        return type("Report", (), {"id": "e"})()


class Service:
    def now(self):
        return 1.0

    def __init__(self):
        self.watching = []

    def watch(self, watcher):
        self.watching.append(watcher)

    def unwatch(self, watcher):
        self.watching.remove(watcher)

    async def between_steps(self, function):
        return function()


async def until(condition):
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def make(path=None):
    changed = []
    task = LiveTuning(EngineTuning(), Service(), lambda *change: changed.append(change), path)
    return task, task.experiments, changed


@pytest.mark.anyio
async def test_a_change_that_fails_does_not_end_the_task(caplog):
    task, _, changed = make()
    task._tuning.changes = [Change(), Change()]
    made = task._change

    def fails_first(setting, value):
        made(setting, value)
        if len(changed) == 1:
            raise RuntimeError("the engine failed")

    task._change = fails_first
    task.start()
    await until(lambda: len(changed) == 2)
    await task.stop()
    assert "x cannot be set to 2" in caplog.text


@pytest.mark.anyio
async def test_changes_are_made_and_the_file_follows(tmp_path):
    path = tmp_path / "experiments.json"
    task, _, changed = make(path)
    task.start()
    await until(lambda: changed and path.exists())
    assert changed == [("x", 2)]
    task.begin({"setting": "x"})
    await until(lambda: json.loads(path.read_text())["experiments"][0]["started"] == 1)
    await task.stop()
    again, experiments, _ = make(path)
    again.start()
    assert experiments.restored == [{"id": "e", "started": 1}]
    await again.stop()
    assert os.listdir(tmp_path) == ["experiments.json"]


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["", "[]", '{"version": 2, "experiments": []}', '{"version": 1}'])
async def test_an_unreadable_file_is_reported_and_not_fatal(tmp_path, caplog, text):
    path = tmp_path / "experiments.json"
    path.write_text(text)
    task, experiments, _ = make(path)
    with caplog.at_level(logging.WARNING):
        task.start()
    assert experiments.restored is None
    assert "are not continued" in caplog.text
    await task.stop()
    assert (tmp_path / "experiments.json.unreadable").read_text() == text, "it is not overwritten"


@pytest.mark.anyio
async def test_a_full_disk_is_reported_and_not_fatal(tmp_path, caplog, monkeypatch):
    def full(path, text, mode):
        raise OSError("no space left")

    monkeypatch.setattr(module, "replace_text", full)
    task, _, changed = make(tmp_path / "experiments.json")
    with caplog.at_level(logging.WARNING):
        task.start()
        await until(lambda: "cannot be written" in caplog.text)
    assert changed
    await task.stop()


async def read_all(reading):
    """What a generator returns, and how often it yielded."""
    for count in range(12_000):
        try:
            next(reading)
        except StopIteration as stop:
            return stop.value, count
        await asyncio.sleep(0.005)
    raise AssertionError("it did not end")


@pytest.mark.anyio
async def test_a_curve_is_read_between_two_steps_and_the_loop_does_not_wait_for_it():
    measured, threads, go = StepCurve((0.1, 0.2, 0.3)).measured(), [], threading.Event()

    def read():
        assert go.wait(60)
        threads.append(threading.current_thread().name)
        return measured if len(threads) == 1 else None

    service = EngineService(hashing_engine()[0], Limits(8, 100))
    service.start()
    read_curve = curve_reader(service, read)
    try:
        reading = read_curve()
        next(reading)
        go.set()
        curve, _ = await read_all(reading)
        assert curve.measured() == measured
        assert (await read_all(read_curve()))[0] is None
    finally:
        service.stop()
    assert threads == ["headrace-engine"] * 2


@pytest.mark.anyio
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_curve_of_an_engine_that_has_failed_cannot_be_read(stopped):
    async with house() as h:
        read_curve = curve_reader(h.service, lambda: h.process.ask("measured_steps"))
        if stopped:
            h.process.stop()
        else:
            h.theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(NotEvaluated, match="the step times of the engine cannot be read: "):
            await read_all(read_curve())
