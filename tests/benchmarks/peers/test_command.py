from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peers import install, race
from benchmarks.peers.__main__ import command_line, main
from headrace.compute.kernels import select

ROOT = Path(__file__).parents[3]
SHOWN = re.findall(
    r"^python -m benchmarks\.peers (.+)$", (ROOT / "docs/guide/benchmarking.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("words", SHOWN)
def test_commands_in_the_guide_are_understood(words):
    assert command_line().parse_args(shlex.split(words, comments=True)).command


def test_the_guide_shows_all_commands():
    assert {words.split()[0] for words in SHOWN} == {"install", "race", "picture"}


@pytest.fixture
def signals():
    """The command's handlers end with the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def reported(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """The exit status of a command and what it says of errors."""
    monkeypatch.setattr(sys, "argv", ["benchmarks.peers", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--cores", "0"), "--cores: 0 is not from 1 to"),
        (("--cores", "100000"), "--cores: 100000 is not from 1 to"),
        (("--concurrency", "-2"), "--concurrency: -2 is not at least 1"),
        (("--concurrency", "0"), "--concurrency: 0 is not at least 1"),
        (("--requests", "-3"), "--requests: -3 is not at least 1"),
        (("--rounds", "0"), "--rounds: 0 is not at least 1"),
        (("--contenders", "headrace"), "--contenders: a race has two or more"),
        (("--contenders", "headrace", "headrace"), "--contenders: a race has two or more"),
        (("--requests", "many"), "--requests: many is no number"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_started(monkeypatch, capsys, words, expected):
    monkeypatch.setattr(race, "run", None)
    status, error = reported(monkeypatch, capsys, "race", *words)
    assert status == 2
    assert expected in error


def test_a_peer_that_is_not_there_is_named_before_weights_are_written(monkeypatch, capsys, tmp_path, signals):
    monkeypatch.setattr(race.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(race, "write_folder", None)
    output = str(tmp_path / "race.json")
    words = ("--home", str(tmp_path), "race", "--contenders", "headrace", "llama.cpp", "--output", output)
    status, error = reported(monkeypatch, capsys, *words)
    assert status == 2
    assert "llama.cpp is not installed: python -m benchmarks.peers install llama.cpp" in error


@pytest.fixture
def nothing_starts(monkeypatch):
    for name in ("write_folder", "start"):
        monkeypatch.setattr(race, name, None)
    monkeypatch.setattr(race.os, "sched_setaffinity", lambda *_: None)


def test_a_missing_matplotlib_is_named_before_anything_is_started(
    monkeypatch, capsys, tmp_path, signals, nothing_starts
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, error = reported(monkeypatch, capsys, "race", "--output", str(tmp_path / "race.json"))
    assert status == 2
    assert "no plot without matplotlib" in error


@pytest.mark.parametrize("place", ["file/race.json", "folder"])
def test_a_report_that_cannot_be_written_is_named_before_anything_is_started(
    monkeypatch, capsys, tmp_path, signals, nothing_starts, place
):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    status, error = reported(monkeypatch, capsys, "race", "--output", str(tmp_path / place))
    assert status == 2
    assert f"--output {tmp_path / place}: " in error


def test_a_race_without_compiled_kernels_is_refused(monkeypatch, capsys, tmp_path, signals, nothing_starts):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules['headrace.compute.kernels._cpu'] = None"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    words = ("race", "--output", str(tmp_path / "race.json"), "--contenders", "headrace", "transformers")
    status, error = reported(monkeypatch, capsys, *words)
    assert status == 2
    assert (
        "headrace would be measured without its kernels: the C++ kernels of the CPU cannot be loaded" in error
    )
    assert install.kernels(["transformers"]) == ""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if select("auto", torch.device("cpu")).name == "cpp":
        assert install.kernels(["headrace"]).startswith("cpp ")


def test_a_race_in_which_requests_failed_fails(monkeypatch, capsys, tmp_path, signals):
    monkeypatch.setattr(race, "run", lambda *_: 3)
    assert reported(monkeypatch, capsys, "race", "--cores", "1")[0] == 1
    monkeypatch.setattr(race, "run", lambda *_: 0)
    main()


def test_a_hangup_ends_a_race_and_its_servers_unless_it_is_to_outlive_it(monkeypatch, signals):
    monkeypatch.setattr(race, "run", lambda *_: 0)
    monkeypatch.setattr(sys, "argv", ["benchmarks.peers", "race", "--cores", "1"])
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    main()
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    main()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
