"""The facade for notebooks: traces, policies, rows for any table library, and figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import ConfigError
from headrace.notebook import Simulation, Trace, load_trace, make_trace, simulate


class LongestFirst:
    """A queue order that is easy to tell from others."""

    def rank(self, request, number):
        return (-len(request.tokens), number)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("traces") / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(
            f"2023-11-16 18:15:{i // 10:02}.{i % 10}5,{300 + 90 * (i % 7)},{9 + i}\n" for i in range(60)
        )
    )
    return load_trace(path, limit=50)


@pytest.fixture(scope="module")
def result(trace: Trace) -> Simulation:
    policies = {"fcfs": {}, "longest": {"queue_order": LongestFirst}}
    return simulate(trace, policies, scheduling_policy="fcfs", max_num_seqs=2, ttft=1.0)


def test_a_trace_has_a_row_per_request(trace: Trace) -> None:
    assert len(trace) == len(trace.rows) == 50
    assert trace.rows[0] == {
        "arrived_seconds": 0.0,
        "prompt_tokens": 300,
        "output_tokens": 9,
        "tenant": "default",
        "service_class": "default",
    }


def test_every_policy_has_its_rows(trace: Trace, result: Simulation) -> None:
    assert [row["policy"] for row in result.summary] == ["fcfs", "longest"]
    assert all(row["requests"] == 50 and row["failed"] == 0 for row in result.summary)
    assert all(0 < row["ttft_p50"] < row["e2e_p99"] for row in result.summary)
    assert all(0 <= row["slo_share"] <= 1 for row in result.summary)
    assert len(result.requests) == 100
    assert sum(row["output_tokens"] for row in result.requests if row["policy"] == "fcfs") == sum(
        call.output_tokens for call in trace.calls
    )
    for rows in (result.summary, result.timeline, result.tenants):
        assert len({tuple(row) for row in rows}) == 1, "rows of one table have the same columns"


def test_a_class_given_as_a_policy_is_used(result: Simulation) -> None:
    def mean_of_longest(policy: str) -> float:
        waits = [
            row["ttft_seconds"]
            for row in result.requests
            if row["policy"] == policy and row["prompt_tokens"] == 840
        ]
        return sum(waits) / len(waits)

    assert mean_of_longest("longest") < 0.8 * mean_of_longest("fcfs")


def test_names_of_scheduling_policies_are_policies() -> None:
    trace = make_trace("tenant=a,rate=20,prompt=100,answer=10", count=40)
    result = simulate(trace, ["fair", "fcfs"])
    assert [row["policy"] for row in result.summary] == ["fair", "fcfs"]
    assert result.title.endswith(trace.name)


def test_wrong_names_are_reported(trace: Trace, tmp_path: Path) -> None:
    for given, reported in (
        ({"max_num_seq": 3}, "did you mean max_num_seqs"),
        ({"device": "abacus"}, "device: "),
        ({"queue_order": "shortst"}, "did you mean shortest"),
    ):
        with pytest.raises(ConfigError, match=reported):
            simulate(trace, {"one": {}}, **given)
    with pytest.raises(ConfigError, match="got the text 'fcfs'"):
        simulate(trace, "fcfs")
    with pytest.raises(ConfigError, match=r"nothing\.csv cannot be read: no such file"):
        load_trace(tmp_path / "nothing.csv")
    with pytest.raises(ConfigError, match="above 0, got 0"):
        load_trace(tmp_path / "nothing.csv", speedup=0)
    with pytest.raises(ConfigError):
        make_trace("tenant=a,rate=fast")


def test_figures_are_returned_and_written(result: Simulation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = result.plot()
    assert [axis.get_title() for axis in figure.axes] == ["TTFT, target 1000 ms", "TPOT"]
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["fcfs", "longest"]
    written = result.save_plots(tmp_path)
    assert written
    assert all(path.stat().st_size > 1000 for path in written)


def test_rows_become_a_table(result: Simulation) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(result.requests)
    assert frame.groupby("policy")["ttft_seconds"].mean().notna().all()


def test_it_needs_no_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import headrace.notebook as n; n.make_trace('tenant=a,rate=1')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
