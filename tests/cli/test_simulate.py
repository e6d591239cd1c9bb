from __future__ import annotations

import csv
import json
import re

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.machines import TransferFlags
from headrace.config import ConfigError
from headrace.wiring.simulation import WIRE
from tests.lab.calibration.test_values import CALIBRATION

TRACE = "req_time_s,client,prompt_len,output_len\n" + "".join(
    f"{0.05 * i},{i % 3},{20 + 7 * i % 90},{3 + i % 11}\n" for i in range(60)
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_simulated_trace_is_reported_and_written(trace, tmp_path):
    out = tmp_path / "out" / "sim.json"
    shown = run("--trace", trace, "--slo-ttft", "0.5", "--output", out, "--replicas", "2")
    assert "llama-3.1-8b on 1 x H100-SXM" in shown
    assert "fair: per tenant" in shown
    reported = json.loads(out.read_text())
    assert reported["summary"]["requests"] == 60
    assert reported["summary"]["failed"] == 0
    assert {part["name"] for part in reported["tenants"]} == {"0", "1", "2"}
    assert reported["settings"]["scheduler"]["max_num_seqs"] == 512, "the device's own default"
    assert reported["settings"]["replicas"] == 2


def test_without_targets_goodput_is_unset(trace, tmp_path):
    out = tmp_path / "sim.json"
    shown = run("--trace", trace, "--output", out)
    assert re.search(r"goodput requests/s\W+unset: no targets", shown)
    reported = json.loads(out.read_text())
    assert reported["summary"]["goodput"] is None
    assert {part["slo_share"] for part in reported["tenants"]} == {None}
    assert "unset" not in run("--trace", trace, "--slo-tpot", "1s", "--output", out)
    reported = json.loads(out.read_text())
    assert reported["summary"]["goodput"] > 0
    assert {part["slo_share"] for part in reported["tenants"]} == {1.0}


def test_an_experiment_is_written_as_the_server_reports_it(trace, tmp_path):
    file, out = tmp_path / "experiment.yaml", tmp_path / "sim.json"
    body = {"setting": "max_running", "treatment": 4, "metric": "requests_per_second"}
    file.write_text(json.dumps(body | {"window_seconds": 0.2, "burn_in_seconds": 0.1, "max_seconds": 2}))
    run("--trace", trace, "--experiment", file, "--output", out, "--requests", "200", "--resample")
    (report,) = json.loads(out.read_text())["experiments"]
    assert (report["setting"], report["treatment"], report["object"]) == ("max_running", 4, "experiment")
    assert report["pairs"] >= 1
    assert set(report["effect"]) >= {"change", "interval", "e_value"}
    run("--trace", trace, "--output", out)
    assert json.loads(out.read_text())["experiments"] == []


@pytest.mark.parametrize("policy", ["fair", "static"])
def test_equal_runs_write_equal_files(trace, tmp_path, policy):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in files:
        run(
            *("--trace", trace, "--requests", "90", "--resample", "--seed", "3", "--output", path),
            *("--scheduling-policy", policy, "--device", "cpu", "smollm2-135m", "--speedup", "3"),
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    run(*("--trace", trace, "--requests", "90", "--resample", "--seed", "4", "--output", files[1]))
    assert files[0].read_bytes() != files[1].read_bytes()


def test_a_population_on_a_calibrated_machine(tmp_path):
    path = tmp_path / "c.json"
    CALIBRATION.write(path)
    shown = run(
        *("--calibration", path, "--requests", "50", "--plot", tmp_path / "plots"),
        *("--workload", "tenant=chat,rate=2,prompt=100,answer=20,turns=3,system=64"),
        *("--workload", "tenant=jobs,rate=1,prompt=uniform:50:90,answer=5,class=flex"),
    )
    assert "m on a machine" in shown
    assert "per class" in shown
    assert (tmp_path / "plots" / "timeline.png").exists()


def test_prefill_replicas_are_compared_with_replicas_for_both(trace, tmp_path):
    path = tmp_path / "runs.json"
    words = ("--trace", trace, "--requests", "20", "--replicas", "3", "--kv-offload-bytes", "1GiB")
    shown = run(*words, "--prefill-replicas", "0", "--prefill-replicas", "1", "--output", path)
    assert "1 prefill, 2 decode" in shown
    runs = json.loads(path.read_text())["runs"]
    both, apart = runs["3 for both"]["summary"], runs["1 prefill, 2 decode"]["summary"]
    assert both["requests"] == apart["requests"] == 20
    assert apart["ttft"]["p50"] > both["ttft"]["p50"] + 0.006
    assert runs["3 for both"]["settings"]["transfer"] == {
        "latency": 0.006,
        "bytes_per_second": 25e9,
        "at_once": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either --trace FILE or --workload"),
        (("--workload", "rate=1", "--resample"), "--resample"),
        (("--workload", "rate=fast"), "workload 'rate=fast'"),
        (("--trace", "/dev/null"), "/dev/null:1: unknown format"),
        (("--trace", "/nowhere.csv"), "nowhere.csv cannot be read: no such file"),
        (("--workload", "rate=1", "--device", "abacus"), "--device: there is no device 'abacus'"),
        (("--workload", "rate=1", "--weights", "fp3"), "--weights fp3: expected one of"),
        (("--workload", "rate=1", "--degree", "3"), "--degree 3: llama-3.1-8b has 8 KV heads"),
        (("--workload", "rate=1", "--routing", "luck"), "--routing luck"),
        (("--workload", "rate=1", "--speedup", "0"), "above 0"),
        (("--workload", "rate=1", "--slo-ttft", "soon"), "--slo-ttft: expected a duration such as 500ms"),
        (("--workload", "rate=1", "--seed", "x"), "--seed: expected a whole number"),
        (("--workload", "rate=1", "--export", "rows.txt"), "--export rows.txt: .*csv"),
        (
            ("--workload", "rate=1", "--prefill-replicas", "1"),
            "--prefill-replicas 1: .* of --replicas 1 must",
        ),
        (("--workload", "rate=1", "--replicas", "2", "--prefill-replicas", "1"), "set --kv-offload-bytes"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, message):
    with pytest.raises(ConfigError, match=message):
        run(*words)


def test_a_trace_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"t\.csv: the file is not UTF-8"):
        run("--trace", tmp_path / "t.csv")


def test_policies_are_compared_over_the_same_requests(trace, tmp_path):
    out, rows = tmp_path / "sim.json", tmp_path / "rows.csv"
    shown = run(
        *("--trace", trace, "--scheduling-policy", "fcfs", "--scheduling-policy", "fair", "--speedup", "40"),
        *("--device", "cpu", "--slo-ttft", "500ms", "--slo-tpot", "50ms", "--output", out, "--export", rows),
        *("--plot", tmp_path / "plots"),
    )
    assert re.search(r"┃ +fcfs ┃ +fair ┃ / fcfs ┃", shown)
    assert re.search(r"TTFT p50 ms +│ +\S+ │ +\S+ │ +\d+\.\d\dx", shown)
    assert "SLO TTFT 500 ms, TPOT 50 ms" in shown
    reported = json.loads(out.read_text())["runs"]
    assert reported["fcfs"]["summary"]["prompt_tokens"] == reported["fair"]["summary"]["prompt_tokens"]
    assert reported["fcfs"]["summary"]["tpot"] != reported["fair"]["summary"]["tpot"]
    listed = list(csv.DictReader(rows.open()))
    assert [row["run"] for row in listed] == ["fcfs"] * 60 + ["fair"] * 60
    assert (tmp_path / "plots" / "latency.png").exists()


def test_latency_targets_reach_the_scheduler(tmp_path):
    """Under load, ``fair`` keeps decoding within the target; without one it does not know it."""
    load = ("--workload", "rate=200,prompt=uniform:200:2000,answer=uniform:50:100", "--requests", "300")
    tpot = []
    for name, target in (("none", ()), ("tight", ("--slo-tpot", "15ms"))):
        run(
            *load,
            "--max-step-seconds",
            "0",
            "--mixed-prefill-ratio",
            "0",
            *target,
            "--output",
            tmp_path / name,
        )
        tpot.append(json.loads((tmp_path / name).read_text())["summary"]["tpot"]["p50"])
    assert tpot[1] < 0.8 * tpot[0]


@pytest.mark.parametrize(
    ("slots", "hinted"), [("4", True), ("512", False)], ids=["slots are the limit", "there are enough"]
)
def test_slots_that_leave_memory_idle_are_hinted_at(trace, slots, hinted):
    shown = run("--trace", trace, "--speedup", "50", "--max-num-seqs", slots)
    assert ("Slots are the limit, not memory: try --max-num-seqs" in shown) == hinted


@pytest.mark.parametrize("flag", ["--output", "--plot"])
def test_what_cannot_be_written_is_one_line(tmp_path, flag):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{flag} .*file"):
        run("--workload", "rate=5", "--requests", 3, flag, tmp_path / "file" / "x")


def test_a_broken_trace_error_names_its_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TRACE + "3.5,1,many,3\n")
    with pytest.raises(ConfigError, match=r"t.csv:62: "):
        run("--trace", path)


LONG = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{i:02}.5,200,120\n" for i in range(20)
)


def figures(tmp_path, *words):
    (tmp_path / "long.csv").write_text(LONG)
    out = tmp_path / "out.json"
    run("--trace", tmp_path / "long.csv", "--output", out, *words)
    return json.loads(out.read_text())


def test_drafts_that_are_accepted_shorten_answers_and_others_do_not(tmp_path):
    plain = figures(tmp_path)
    assert plain["facts"]["drafted_tokens"] == 0
    good = figures(tmp_path, "--acceptance", "0.8")
    # Of 16 drafts, 0.8 + 0.8 ** 2 + ... are right.
    assert good["facts"]["accepted_tokens"] / good["facts"]["drafted_tokens"] == pytest.approx(0.26, abs=0.08)
    assert good["summary"]["output_tokens"] == plain["summary"]["output_tokens"]
    assert good["summary"]["tpot"]["mean"] < 0.45 * plain["summary"]["tpot"]["mean"]
    costly = figures(tmp_path, "--acceptance", "0.8", "--draft-cost", "0.2")
    assert (
        good["summary"]["tpot"]["mean"] < costly["summary"]["tpot"]["mean"] < plain["summary"]["tpot"]["mean"]
    )
    useless = figures(tmp_path, "--acceptance", "0.05", "--draft-cost", "0.5")
    assert useless["summary"]["tpot"]["mean"] < 1.1 * plain["summary"]["tpot"]["mean"]
    fixed = '{"method": "ngram", "num_speculative_tokens": 2, "adaptive": false}'
    reported = figures(tmp_path, "--acceptance", "1,0", "--speculative-config", fixed)
    assert reported["facts"]["accepted_tokens"] / reported["facts"]["drafted_tokens"] == pytest.approx(
        0.5, abs=0.02
    )
    assert reported["settings"]["acceptance"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--acceptance", "much"), "--acceptance: expected numbers from 0 to 1 such as 0.7"),
        (("--draft-cost", "0.1"), "--draft-cost 0.1 requires --acceptance"),
        (("--speculative-config", '{"method": "ngram"}'), "a simulation has no text to draft from"),
    ],
)
def test_drafts_that_cannot_be_simulated_are_refused(trace, words, message):
    with pytest.raises(ConfigError, match=message):
        run("--trace", trace, *words)


def test_the_connection_between_replicas_is_that_of_a_fleet_made_in_python():
    assert TransferFlags().wire(1) == WIRE


def test_a_trace_without_requests_is_refused(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp_s,input_tokens,output_tokens\n0.0,5,0\n")
    with pytest.raises(ConfigError, match=r"--trace .*trace.csv has no requests with a prompt and an output"):
        run("--trace", trace)
