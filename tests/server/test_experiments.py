"""Experiments on a real server under load: a planted regression is undone; the tuner rehearses the traffic."""

import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.conftest import serving
from tests.server.test_engine_process import engine_of
from tests.waiting import eventually

PATH = "/v1/experiments"
BODY = {
    "setting": "max_running",
    "treatment": 1,
    "metric": "itl_p99_seconds",
    "guards": {"output_tokens_per_second": 0.1},
    "window_seconds": 0.5,
    "burn_in_seconds": 0.2,
    "max_seconds": 600.0,
}


class Load:
    """Clients that send requests one after the other."""

    def __init__(self, server, number=8):
        self._server, self._end = server, threading.Event()
        self._pool = ThreadPoolExecutor(number)
        self.statuses = []
        for _ in range(number):
            self._pool.submit(self._run)

    def _run(self):
        while not self._end.is_set():
            body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True}
            self.statuses.append(self._server.post("/v1/completions", body).status_code)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._end.set()
        self._pool.shutdown()


def test_a_planted_regression_is_rolled_back(tmp_path):
    file = tmp_path / "experiments.json"
    with serving("--experiments-file", str(file)) as server, Load(server) as load:
        eventually(lambda: len(load.statuses) > 8)
        started = server.post(PATH, BODY)
        assert started.status_code == 201
        experiment_id = started.json()["id"]
        report = eventually(lambda: _ended(server, experiment_id))
        assert report["status"] == "rolled_back"
        assert "output_tokens_per_second changed by -" in report["why"]
        assert report["pairs"] * 2 == len(report["windows"])
        listed = server.get(PATH).json()
        assert [each["id"] for each in listed["data"]] == [experiment_id]
        eventually(lambda: server.get(PATH).json()["settings"]["max_running"]["value"] == 0)
    assert set(load.statuses) == {200}
    assert experiment_id in file.read_text()


def _ended(server, experiment_id):
    report = server.get(f"{PATH}/{experiment_id}").json()
    return report if report["status"] != "running" else None


def test_an_experiment_is_stopped_and_wrong_ones_are_named():
    with serving() as server:
        wrong = server.post(PATH, BODY | {"setting": "max_runing"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "setting")
        assert server.post(PATH, BODY | {"treatment": "one"}).status_code == 400
        assert server.get(f"{PATH}/none").status_code == 404
        started = server.post(PATH, BODY | {"window_seconds": 1000.0, "max_seconds": 10_000.0}).json()
        again = server.post(PATH, BODY)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "experiment_running")
        stopped = httpx.delete(f"{server.url}{PATH}/{started['id']}", timeout=60).json()
        assert stopped["status"] == "stopped"
        assert httpx.delete(f"{server.url}{PATH}/none", timeout=60).status_code == 404


@pytest.mark.parametrize("flags", [(), ("--engine-process", "--api-server-count", "2")])
def test_the_tuner_is_turned_on_and_off(flags):
    with serving("--tuner-window", "1", *flags) as server:
        assert server.get("/v1/tuner").json()["mode"] == "off"
        assert server.post("/v1/tuner", {"mode": "fast"}).status_code == 400
        assert server.post("/v1/tuner", {"mode": "advise"}).json()["mode"] == "advise"
        compared = rehearsed(server)
        assert 0.0 < compared < math.inf  # how good it is depends on the machine
        assert server.post("/v1/tuner", {"mode": "off"}).json()["mode"] == "off"


def rehearsed(server, before=None):
    """What was measured divided by what was rehearsed, once it is another number than ``before``."""
    # A scene has three seconds. Rehearsals have the lowest priority, and others may keep all cores busy.
    compared, until = before, time.monotonic() + 200.0
    while compared == before and time.monotonic() < until:
        body = {"prompt": "The race", "max_tokens": 30, "temperature": 1}
        assert server.post("/v1/completions", body).status_code == 200
        compared = server.get("/v1/tuner").json()["measured_to_rehearsed"]
    assert compared != before
    return compared


def test_the_tuner_goes_on_when_the_process_of_the_engine_is_killed():
    with serving("--engine-process", "--tuner", "on", "--tuner-window", "1") as server:
        compared = rehearsed(server)
        os.kill(engine_of(server), signal.SIGKILL)
        assert 0.0 < rehearsed(server, compared) < math.inf
        report = server.get("/v1/tuner").json()
        assert report["mode"] == "on"
        assert report["settings"]["mixed_prefill_ratio"]["value"] > 0
        assert server.metric("engine_losses_total") == 1.0
        assert not any("Traceback" in line for line in server.lines)
        assert server.stop() == 0


def test_drafts_are_compared_by_request(tmp_path):
    """Half of the requests get no drafts; the other half get them. A restart goes on with the same arms."""
    file, drafts = (
        tmp_path / "experiments.json",
        '{"method": ["ngram", "suffix"], "num_speculative_tokens": 4}',
    )
    flags = ("--experiments-file", str(file), "--speculative-config", drafts)
    body = {
        "setting": "draft_method",
        "treatment": "none",
        "metric": "failed_share",  # no request fails, so it never decides
        "guards": {"e2e_mean_seconds": 10.0},
        "max_seconds": 600.0,
    }
    with serving(*flags) as server:
        described = server.get(PATH).json()["settings"]
        assert described["draft_method"]["choices"] == ["all", "none", "ngram", "suffix"]
        wrong = server.post(PATH, body | {"treatment": "draft_model"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "treatment")
        started = server.post(PATH, body).json()
        assert (started["design"], started["unit"], started["arm"]) == ("split", "request", "both")
        with Load(server):
            first = eventually(lambda: _measured(server, started["id"], 40))
        assert server.stop() == 0
    with serving(*flags) as server:
        again = server.get(f"{PATH}/{started['id']}").json()
        assert again["units"]["control"] >= first["units"]["control"]
        assert [line["what"] for line in again["log"]][-1] == "continued after a restart"
        more = sum(again["units"].values()) + 20
        with Load(server):
            eventually(lambda: _measured(server, started["id"], more))
        stopped = httpx.delete(f"{server.url}{PATH}/{started['id']}", timeout=60).json()
        assert stopped["status"] == "stopped"


def _measured(server, experiment_id, number):
    report = server.get(f"{PATH}/{experiment_id}").json()
    enough = sum(report["units"].values()) >= number and min(report["units"].values()) > 0
    return report if enough or report["status"] != "running" else None
