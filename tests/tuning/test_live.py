"""The task that runs experiments: what it changes, what it writes, and what a broken file does."""

import asyncio
import json
import logging
import os

import pytest

from headrace.tuning import live as module
from headrace.tuning.live import LiveTuning


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
