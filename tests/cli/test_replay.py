from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError
from tests.observe.steps.trace_events import check_trace
from tests.wiring.test_recording import recorded


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    recorded(path)
    return path


def run(*words, code=0) -> str:
    result = CliRunner().invoke(app, ["replay", *map(str, words)], env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_a_trace_that_agrees_says_so_and_no_more(trace):
    text = run(trace)
    assert re.search(r"recorded  \d+ steps in \d\.\d\d s, 8 requests", text)
    assert text.endswith("replay    all events are as recorded\n")
    assert "step 0" not in text


def test_steps_are_shown_in_their_range(trace):
    text = run(trace, "--from", "2", "--to", "3")
    assert re.findall(r"─ step (\d+) ", text) == ["2", "3"]
    assert "waits" in text


def test_following_shows_every_step(trace):
    shown = re.findall(r"─ step (\d+) ", run(trace, "--follow"))
    assert shown == [str(i) for i in range(len(shown))]
    assert len(shown) > 8


def test_one_request(trace):
    text = run(trace, "--request", "r2")
    assert "finished (length) after 12 tokens" in text
    with pytest.raises(ConfigError, match="--request nobody"):
        run(trace, "--request", "nobody")


def test_other_settings_are_compared(trace):
    text = run(trace, "--policy", "fcfs", "--set", "max-num-seqs=1")
    assert "scheduling_policy=fcfs, max-num-seqs=1" in re.sub(r"\s+", " ", text.replace("┃", " "))
    assert "simulated, unchanged" in text
    assert "preemptions" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "fcfs"], "--set fcfs: expected NAME=VALUE"),
        (["--policy", "random"], "scheduling_policy: expected one of"),
        (["--policy", "fcfs", "--from", "1"], "compare whole runs"),
    ],
)
def test_what_makes_no_sense_is_one_line(trace, words, message):
    with pytest.raises(ConfigError, match=message):
        run(trace, *words)


def test_a_file_that_is_no_trace_is_one_line(tmp_path):
    (tmp_path / "x").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"x:1: this is not a trace"):
        run(tmp_path / "x")
    with pytest.raises(ConfigError, match="no such file"):
        run(tmp_path / "y")


def test_a_path_in_brackets_is_shown_as_it_is(trace):
    path = trace.rename(trace.with_name("a[b]c[bold].jsonl"))
    assert "a[b]c[bold].jsonl" in run(path)


def test_a_life_that_differs_is_shown_and_fails(trace):
    lines = trace.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines) if '"Finished",{"request_id":"r1"' in line)
    reported = json.loads(lines[number])
    (fields,) = (
        fields for name, fields in reported["events"] if name == "Finished" and fields["request_id"] == "r1"
    )
    fields["output_tokens"] += 1
    trace.write_text("\n".join([*lines[:number], json.dumps(reported), *lines[number + 1 :]]) + "\n")
    text = run(trace, code=1)
    assert f"the replay differs from line {number + 1} on" in text
    assert "step " in text
    assert "differs" in run(trace, "--policy", "fcfs", code=1)


def test_a_cache_that_was_taken_over_is_mentioned(trace):
    first, *rest = trace.read_text().splitlines(keepends=True)
    trace.write_text(first + '{"adopted": 1200}\n' + "".join(rest))
    assert "note      the run began with 1,200 blocks of an earlier run" in run(trace)


def test_a_cut_trace_says_why(trace):
    trace.write_text(trace.read_text()[:-30])
    assert re.search(r"cut       line \d+ is incomplete", run(trace))


def test_steps_are_exported_for_the_page_and_for_perfetto(trace, tmp_path):
    perfetto, steps = tmp_path / "p.json", tmp_path / "s.json"
    text = run(trace, "--perfetto", perfetto, "--steps", steps, "--from", "2")
    assert str(perfetto) in text
    check_trace(json.loads(perfetto.read_text()))
    shown = json.loads(steps.read_text())
    assert shown["source"] == "recording"
    assert shown["settings"]["num_blocks"] > 0
    assert shown["steps"]
    assert {row["id"] for step in shown["steps"] for row in step["rows"]} <= {
        r["id"] for r in shown["requests"]
    }


@pytest.mark.parametrize("words", [["--request", "r2"], ["--follow"], ["--policy", "fcfs"]])
def test_an_export_shows_nothing_else(trace, tmp_path, words):
    with pytest.raises(ConfigError, match="export the recorded run"):
        run(trace, "--perfetto", tmp_path / "p.json", *words)


def test_an_export_of_no_steps_is_an_error(trace, tmp_path):
    with pytest.raises(ConfigError, match="no such steps"):
        run(trace, "--steps", tmp_path / "s.json", "--from", "100000")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(trace, "--steps", trace / "s.json")
