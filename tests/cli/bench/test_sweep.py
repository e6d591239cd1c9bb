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


def test_a_spent_budget_is_said(tmp_path):
    shown = run(*SIMULATED, "--axis", "concurrency", "--budget", "0.001s", "--output", tmp_path / "s.json")
    assert "9 of 10 trials were not run: --budget 0.001 s was spent" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
