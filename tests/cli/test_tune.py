"""``headrace tune`` in virtual time, and its errors."""

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import ConfigError, options

SIMULATED = ("llama-3.1-8b", "--simulated-device", "H100-SXM", "--max-model-len", "8192")
LOAD = "tenant=a,rate=20,arrivals=poisson,prompt=uniform:100:300,answer=uniform:10:20"


def run(*words):
    result = CliRunner().invoke(app, ["tune", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    pytest.importorskip("optuna")
    files = [tmp_path_factory.mktemp("tune") / name for name in ("a.yaml", "b.yaml")]
    words = (*SIMULATED, "--workload", LOAD, "--requests", 500, "--window", "5s", "--trials", 6)
    wrong = ("--max-num-seqs", 2, "--slo", "ttft:100ms", "--slo", "tpot:40ms")
    shown = [run(*words, *wrong, "--output", file) for file in files]
    return shown[0], files


def test_wrong_settings_are_improved_and_the_held_out_part_says_by_how_much(tuned):
    shown, (file, _) = tuned
    assert "requests within SLO" in shown
    assert "95 % interval" in file.read_text()
    assert "Requests that met each target: ttft " in file.read_text()
    assert "nothing is recommended" not in shown
    assert yaml.safe_load(file.read_text())["max-num-seqs"] > 2


def test_the_file_is_one_that_serve_reads(tuned):
    _, (file, _) = tuned
    given = options({}, file)
    assert given.model.model == "llama-3.1-8b"
    assert given.scheduler.max_num_batched_tokens >= given.scheduler.max_num_seqs


def test_equal_seeds_write_equal_files(tuned):
    _, (one, two) = tuned
    assert one.read_text().replace("a.yaml", "b.yaml") == two.read_text()


def test_where_nothing_can_be_gained_the_present_settings_are_written(tmp_path):
    pytest.importorskip("optuna")
    file = tmp_path / "t.yaml"
    light = "tenant=a,rate=1,arrivals=poisson,prompt=20,answer=10"
    shown = run(
        *SIMULATED,
        "--workload",
        light,
        "--requests",
        200,
        "--trials",
        4,
        "--slo",
        "ttft:10s",
        "--output",
        file,
    )
    assert "present settings" in shown or "present ones" in shown
    assert yaml.safe_load(file.read_text())["max-num-seqs"] == 64
    assert "# was" not in file.read_text()
    assert "Requests that met each target: ttft 100.0 %; no target binds." in file.read_text()


def test_targets_that_nothing_can_meet_are_an_error(tmp_path):
    pytest.importorskip("optuna")
    words = ("--workload", LOAD, "--requests", 500, "--window", "5s", "--trials", 2)
    with pytest.raises(
        ConfigError, match=r"--slo: tpot 1 ms: no request met it with any settings.*the best was [\d.]+ ms"
    ):
        run(*SIMULATED, *words, "--slo", "ttft:1s", "--slo", "tpot:1ms", "--output", tmp_path / "t.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "/nowhere.csv"), "--workload /nowhere.csv cannot be read"),
        (("--workload", "tenant=a,pace=3"), "pace"),
        (
            ("--workload", LOAD, "--workload", "trace.csv"),
            "--workload: give one trace, or one or more tenants",
        ),
        (("--workload", LOAD, "--requests", "20"), "--workload: the workload has 20 requests"),
        (("--workload", LOAD, "--slo", "speed:3s"), "--slo speed:3s: expected NAME:DURATION"),
        (("--workload", LOAD, "--budget", "0s"), "--budget and --window"),
        (("--workload", LOAD, "--speedup", "0"), "--speedup"),
        (("--workload", LOAD, "--speculative-config", '{"method": "ngram"}'), "--speculative-config"),
    ],
)
def test_bad_input_is_named(words, message):
    with pytest.raises(ConfigError, match=message):
        run(*SIMULATED, *words)
