"""The benchmark's command line, over the hashing runner and a server that is not there."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.bench import commands as bench
from headrace.cli.bench.commands import bench_app
from headrace.cli.bench.targets import Spec
from headrace.config import ConfigError, Options
from headrace.lab.bench.engine import EngineTarget
from headrace.lab.bench.stats import Record, Target
from headrace.lab.workload.work import Prompt, Work
from headrace.testing.engines import hashing_engine


def hashing_target(spec: Spec, given: Options) -> Target:
    def tokens(prompt: Prompt) -> tuple[int, ...]:
        assert not isinstance(prompt, str)
        return tuple(int(token) for token in prompt)  # type: ignore[call-overload]

    return EngineTarget(spec.name, hashing_engine()[0], tokens)


def run(*words: str) -> Any:
    return CliRunner().invoke(bench_app, words, catch_exceptions=False)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "make_target", hashing_target)


SMALL = ("--dataset-name", "fixed", "--num-prompts", "6", "--input-len", "5", "--output-len", "4")


@pytest.mark.usefixtures("drawn")
def test_throughput_prints_a_table_and_writes_what_it_takes_to_repeat_it(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    result = run("throughput", *SMALL, "--output", str(output), "--goodput", "ttft:60 e2e:60")
    assert result.exit_code == 0
    assert "output tokens/s" in result.output
    reported = json.loads(output.read_text())
    assert reported["settings"]["dataset"] == {
        "name": "fixed",
        "path": None,
        "count": 6,
        "input_len": 5,
        "output_len": 4,
        "prefix_len": 1000,
        "seed": 0,
        "rate": None,
        "burstiness": 1.0,
    }
    assert reported["settings"]["options"]["scheduler"]["max_num_seqs"] == 64
    assert "server" not in reported["settings"]["options"], "it holds API keys"
    assert reported["runs"][0]["summary"]["output_tokens"] == 24
    assert reported["runs"][0]["summary"]["goodput"] > 0
    assert (reported["bound"]["batch"], reported["bound"]["gain"]) == (64, 1.0)
    assert output.with_suffix(".png").exists()


def test_an_unwritable_report_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .* cannot be written: file exists"):
        run("throughput", *SMALL, "--output", str(tmp_path / "file" / "run.json"))


def test_compare_alternates_and_tells_ratios(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    targets = ("--target", "a=headrace", "--target", "b=headrace-static", "--rounds", "2")
    result = run("compare", *targets, *SMALL, "--dataset-name", "log-normal", "--output", str(output))
    assert result.exit_code == 0
    assert "(medians of 2 rounds)" in result.output
    assert re.search(r"output tokens/s[ │]+\S+[ │]+\S+[ │]+\d+\.\d\dx", result.output)
    reported = json.loads(output.read_text())
    assert [each["target"] for each in reported["runs"]] == ["a", "b", "a", "b"]
    assert reported["ratios"]["b"]["output_tokens_per_second"] > 0
    first, other, again, _ = (
        [record["output_tokens"] for record in each["records"]] for each in reported["runs"]
    )
    assert first == other  # a round is one draw for all,
    assert first != again  # and the next round another


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("throughput", "--goodput", "speed:1"), "speed:1"),
        (("throughput", "--goodput", "ttft"), "NAME:DURATION"),
        (("throughput", "--dataset-name", "nothing"), "high-variance"),
        (("throughput", "--dataset-name", "jsonl"), "path"),
        (("throughput", "--backend", "magic"), "magic"),
        (("compare", "--target", "headrace"), "two or more"),
        (("compare", "--target", "headrace", "--target", "headrace"), "different names"),
        (("serve", "--base-url", "http://127.0.0.1:9"), "names no model"),
        (("serve", "--model", "toy", "--extra-body", "[1"), "JSON object"),
        (("serve", "--model", "toy", "--base-url", "127.0.0.1:8000"), "http://host:port"),
        (("serve", "--model", "toy", "--request-rate", "0"), "--request-rate 0.0: .* above 0"),
        (("serve", "--model", "toy", "--request-rate", "nan"), "--request-rate nan: .* above 0"),
        (("serve", "--model", "toy", "--burstiness", "inf"), "--burstiness inf: .*finite"),
        (("throughput", "--goodput", "ttft:-1"), "ttft:-1: .*above 0"),
        (("throughput", "--goodput", "e2e:nan"), "e2e:nan: .*above 0"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*words)


@pytest.mark.parametrize("command", ["latency", "roofline"])
def test_a_prompt_that_the_model_does_not_take_is_said_with_its_limit(command: str) -> None:
    words = ("--input-len", "100000", "--output-len", "8", "--max-model-len", "256")
    with pytest.raises(ConfigError, match=r"--input-len 100000 .* 256 tokens \(--max-model-len\)"):
        run(command, "builtin", *words, "--batch-size", "1", "--kv-cache-memory-bytes", str(16 << 20))


@pytest.mark.usefixtures("quick_rates")
@pytest.mark.parametrize("command", ["latency", "roofline"])
def test_a_batch_that_memory_does_not_hold_is_one_line(command: str) -> None:
    words = ("--input-len", "200", "--output-len", "8", "--max-model-len", "256", "--batch-size", "16")
    # Memory of one sequence, and not of 16.
    memory = ("--dtype", "bfloat16", "--kv-cache-memory-bytes", str(1 << 19))
    with pytest.raises(ConfigError, match=r"--batch-size 16 .*--kv-cache-memory-bytes"):
        run(command, "builtin", *words, *memory)


def two(*targets: str) -> tuple[str, ...]:
    return ("compare", *(word for target in targets for word in ("--target", target)), "--rounds", "1")


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        (("throughput", "--max-num-seqs", "7"), 7),
        (("throughput", "--backend", "transformers-static", "--batch-size", "3"), 3),
        (two("headrace", "headrace-static,max_num_seqs=5"), 5),
        (two("headrace,max_num_seqs=9", "transformers-static"), 16),
        (two("a=http://a", "b=http://b"), None),
    ],
)
def test_the_bound_is_that_of_the_batches_that_wait(
    tmp_path: Path, words: tuple[str, ...], batch: int | None
) -> None:
    output = tmp_path / "run.json"
    assert run(*words, *SMALL, "--output", str(output)).exit_code == 0
    assert json.loads(output.read_text()).get("bound", {}).get("batch") == batch


def test_no_round_is_warmed_with_its_own_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[set[Prompt]] = []

    class Watching(EngineTarget):
        def run(self, work: Sequence[Work]) -> list[Record]:
            seen.append({each.prompt for each in work})
            return super().run(work)

    monkeypatch.setattr("tests.cli.bench.test_commands.EngineTarget", Watching)
    words = ("--rounds", "3", *SMALL, "--output", str(tmp_path / "run.json"))
    assert run(*two("a=headrace", "b=headrace")[:-2], *words).exit_code == 0
    (warming, _, *rounds) = seen
    assert len(warming) == 4
    assert not any(warming & prompts for prompts in rounds)


@pytest.mark.parametrize("words", [("throughput",), two("a=headrace", "b=headrace")])
def test_requests_that_failed_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    class Failing(EngineTarget):
        def run(self, work: Sequence[Work]) -> list[Record]:
            return [dataclasses.replace(record, error="lost") for record in super().run(work)]

    monkeypatch.setattr("tests.cli.bench.test_commands.EngineTarget", Failing)
    output = tmp_path / "run.json"
    result = run(*words, *SMALL, "--output", str(output))
    assert result.exit_code == 1
    assert output.exists()


def test_a_server_that_fails_requests_fails_the_command(tmp_path: Path) -> None:
    words = (
        "--base-url",
        "http://127.0.0.1:9",
        "--model",
        "toy",
        *SMALL,
        "--output",
        str(tmp_path / "run.json"),
    )
    result = run("serve", *words)
    assert result.exit_code == 1
    assert "ConnectionRefusedError" in result.output.replace("\n", "")


def test_latency_runs_its_batch_as_one_however_few_rows_a_step_would_have(tmp_path: Path) -> None:
    output = tmp_path / "steps.json"
    shape = ("--batch-size", "6", "--input-len", "4", "--output-len", "4", "--max-num-seqs", "2")
    limits = ("--kv-cache-memory-bytes", str(16 << 20), "--max-model-len", "256")
    result = run("latency", "builtin", *shape, *limits, "--output", str(output))
    assert result.exit_code == 0, result.output
    reported = json.loads(output.read_text())
    decode = next(kind for kind in reported["steps"] if kind["kind"] == "decode")
    assert decode["wall"]["count"] >= 1
    assert reported["settings"]["kernels"].split()[0] in ("cpp", "torch")
    assert f"kernels {reported['settings']['kernels']}" in " ".join(result.output.split())


def test_each_request_of_each_round_is_a_row_of_the_export(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    output = ("--output", str(tmp_path / "run.json"), "--export", str(file))
    assert run(*two("a=headrace", "b=headrace")[:-1], "2", *SMALL, *output).exit_code == 0
    rows = list(csv.DictReader(file.open()))
    assert [(row["run"], row["round"]) for row in rows[::6]] == [
        ("a", "1"),
        ("b", "1"),
        ("a", "2"),
        ("b", "2"),
    ]
    assert all(row["output_tokens"] == "4" and float(row["ttft_seconds"]) > 0 for row in rows)


def test_an_export_of_an_unknown_kind_is_refused_before_the_work() -> None:
    with pytest.raises(ConfigError, match=r"--export rows\.txt: .*\.csv or \.parquet"):
        run("throughput", *SMALL, "--export", "rows.txt")
