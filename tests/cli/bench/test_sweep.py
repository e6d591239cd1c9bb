"""``headrace bench sweep`` on a simulated device, and on the built-in model."""

import csv
import json

import pytest
from typer.testing import CliRunner

from headrace.cli.bench.commands import bench_app
from headrace.config import ConfigError

SIMULATED = ("llama-3.1-8b", "--simulated-device", "H100-SXM", "--max-model-len", "4096")


def run(*words):
    result = CliRunner().invoke(bench_app, ["sweep", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("drawn")
def test_a_simulated_device_has_tables_knees_and_files(tmp_path):
    out = tmp_path / "sweep.json"
    small = (
        "--batch-size",
        1,
        "--batch-size",
        8,
        "--concurrency",
        4,
        "--chunk-size",
        64,
        "--chunk-size",
        512,
    )
    shown = run(*SIMULATED, *small, "--output-len", 8, "--output", out)
    assert "batch size: llama-3.1-8b on 1 x H100-SXM, simulated" in shown
    assert "batch size, continuous: no plateau up to 8" in shown
    assert "concurrency, static: only 4 was measured" in shown
    reported = json.loads(out.read_text())["sweep"]
    assert len(reported["points"]) == 10
    for each in reported["points"]:
        assert each["failed"] == 0
        assert 0 < each["tokens_per_second"] < each["roofline"]
        assert each["memory_bytes"] > 15e9, "the weights"
    assert len(list(csv.DictReader(out.with_suffix(".csv").open()))) == 10
    assert out.with_suffix(".png").exists()


def test_continuous_batching_is_faster_than_static_where_lengths_differ(tmp_path):
    out = tmp_path / "sweep.json"
    run(*SIMULATED, "--axis", "batch-size", "--batch-size", 16, "--output", out)
    speed = {
        each["policy"]: each["tokens_per_second"] for each in json.loads(out.read_text())["sweep"]["points"]
    }
    assert speed["continuous"] > 1.3 * speed["static"]


@pytest.mark.usefixtures("quick_rates")
def test_the_engine_itself_is_loaded_once_for_all_points(tmp_path):
    out = tmp_path / "sweep.json"
    shown = run(
        *("--axis", "batch-size", "--batch-size", 1, "--batch-size", 4, "--rounds", 1),
        *("--input-len", 8, "--output-len", 4, "--output", out, "--max-model-len", 256),
        *("--kv-cache-memory-bytes", "8MiB"),
    )
    assert "batch size, static" in shown
    points = json.loads(out.read_text())["sweep"]["points"]
    assert [(each["value"], each["policy"]) for each in points] == [
        (1, "continuous"),
        (4, "continuous"),
        (1, "static"),
        (4, "static"),
    ]
    assert all(each["memory_bytes"] > 0 for each in points)


def test_the_largest_batch_within_latency_targets_is_named_with_the_target_that_binds(tmp_path):
    out = tmp_path / "sweep.json"
    sizes = ("--axis", "batch-size", "--batch-size", 2, "--batch-size", 64, "--policy", "continuous")
    shown = run(*SIMULATED, *sizes, "--slo", "tpot:7ms", "--slo", "ttft:10s", "--output", out)
    assert "2 is the largest value within tpot 7 ms, ttft 10000 ms for 95 % of the requests" in shown
    assert "tpot binds: at 64, " in shown
    reported = json.loads(out.read_text())["sweep"]
    (kept,) = reported["within_slo"]
    assert (kept["largest"], kept["beyond"], kept["binding"]) == (2, 64, "tpot")
    small, large = reported["points"]
    assert small["slo_share"] == small["tpot_met"] == 1.0
    assert small["goodput"] == pytest.approx(small["tokens_per_second"] / 32, rel=0.5), "all requests"
    assert large["slo_share"] < 0.95
    assert large["ttft_met"] == 1.0, "in a closed loop no request waits for a slot"


def test_without_targets_goodput_is_unset(tmp_path):
    out = tmp_path / "sweep.json"
    words = ("--axis", "batch-size", "--batch-size", 2, "--policy", "continuous", "--output", out)
    assert "goodput unset: no targets" in run(*SIMULATED, *words)
    reported = json.loads(out.read_text())["sweep"]
    assert reported["points"][0]["goodput"] is None
    assert reported["points"][0]["slo_share"] is None
    assert reported["within_slo"] == []


def test_targets_that_no_value_meets_are_an_error_after_the_report(tmp_path):
    out = tmp_path / "sweep.json"
    words = (*SIMULATED, "--axis", "batch-size", "--batch-size", 2, "--policy", "continuous")
    with pytest.raises(
        ConfigError, match="within tpot 1 ms for 95 % of the requests; tpot is met by at most 0"
    ):
        run(*words, "--slo", "tpot:1ms", "--output", out)
    assert out.exists()


def test_a_spent_budget_is_said(tmp_path):
    shown = run(*SIMULATED, "--axis", "concurrency", "--budget", "0.001s", "--output", tmp_path / "s.json")
    assert "9 of 10 trials were not run: --budget 0.001 s was spent" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slo", "tftt:1s"), "--slo tftt:1s: expected NAME:DURATION with NAME one of ttft, tpot, itl, e2e"),
        (("--slo", "ttft:0s"), "--slo ttft:0s: expected NAME:DURATION"),
        (("--slo", "ttft:1s", "--slo", "ttft:2s"), "--slo ttft:2s: ttft already has the target 1000 ms"),
        (("--axis", "rows"), "--axis rows: expected one of batch-size, concurrency, chunk-size"),
        (("--policy", "dynamic"), "--policy dynamic: expected one of continuous, static"),
        (("--simulated-device", "H1000"), "--simulated-device: there is no device"),
        ((*SIMULATED, "--chunk-size", "32"), "--chunk-size 32: --max-num-batched-tokens 32 is less than"),
        ((*SIMULATED, "--calibration", "c.json"), "give one of them"),
        ((*SIMULATED, "--degree", "3"), "--degree 3: llama-3.1-8b has 8 KV heads"),
        (("--dataset-name", "high-variance-chats"), "a sweep needs a workload of token ids"),
        (("--speculative-config", '{"method": "ngram"}'), "--speculative-config cannot be set here"),
        (
            (*SIMULATED, "--speculative-config", '{"method": "ngram"}'),
            "--speculative-config cannot be set here",
        ),
    ],
)
def test_bad_input_is_named(words, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        run(*words)


def test_requests_that_do_not_fit_are_an_error(tmp_path):
    with pytest.raises(ConfigError, match="requests failed"):
        run(
            *("llama-3.1-8b", "--simulated-device", "H100-SXM", "--max-model-len", "64"),
            *("--axis", "batch-size", "--batch-size", 2, "--output", tmp_path / "s.json"),
        )
