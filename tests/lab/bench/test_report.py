"""Rows per request as CSV and Parquet."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.lab.bench import report
from headrace.lab.bench.report import COLUMNS, BadExport, check_rows, compare, measure, write_rows
from headrace.lab.bench.stats import Record, summarize
from headrace.lab.plots import plot
from headrace.lab.workload.dataset import fixed_lengths
from headrace.lab.workload.work import Work

ROWS = [
    {"run": "a", "request": "r0", "ttft_seconds": 0.25},
    {"run": "a", "request": "r1", "error": "lost, again"},
]


def test_a_csv_has_all_columns_and_empty_cells_for_what_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    write_rows(path, ROWS)
    first, second = csv.DictReader(path.open())
    assert tuple(first) == COLUMNS
    assert (first["ttft_seconds"], first["error"]) == ("0.25", "")
    assert (second["ttft_seconds"], second["error"]) == ("", "lost, again")


def test_a_parquet_file_has_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    check_rows(path)
    write_rows(path, ROWS)
    table = parquet.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    assert table.column("ttft_seconds").to_pylist() == [0.25, None]


def test_what_cannot_be_written_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadExport, match=r"\.csv or \.parquet"):
        check_rows(Path("rows.xlsx"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("headrace.lab.bench.report.find_spec", lambda name: None)
    with pytest.raises(BadExport, match="pip install pyarrow"):
        check_rows(Path("rows.parquet"))


WORK = fixed_lengths(4, 8, 5)


class Scripted:
    """A target that takes ``seconds[i]`` for its i-th run and tells a shared diary."""

    def __init__(self, name: str, seconds: Sequence[float], diary: list[str]) -> None:
        self.name = name
        self._seconds = list(seconds)
        self._diary = diary

    def run(self, work: Sequence[Work]) -> list[Record]:
        self._diary.append(self.name)
        took = self._seconds.pop(0)
        return [
            Record(w.id, 0.0, took, (took / 2, took), len(w.prompt), w.max_tokens, 0, "length") for w in work
        ]

    def facts(self) -> dict[str, Any]:
        return {"left": len(self._seconds)}

    def close(self) -> None: ...


def test_rounds_alternate_and_ratios_are_medians_per_round() -> None:
    diary: list[str] = []
    base = Scripted("base", [1.0, 10.0, 1.0], diary)  # the machine is slow in the second round
    twice = Scripted("twice", [0.5, 5.0, 0.25], diary)
    reported: list[tuple[int, str]] = []
    result = compare(
        [base, twice], WORK, 3, finished=lambda number, run: reported.append((number, run.target))
    )
    assert diary == ["base", "twice", "twice", "base", "base", "twice"]
    assert [name for _, name in reported] == diary
    assert result.ratios["twice"]["output_tokens_per_second"] == pytest.approx(2.0)
    assert result.ratios["twice"]["ttft_p99"] == pytest.approx(0.5)
    assert [run.summary.seconds for run in result.middle()] == [1.0, 0.5]
    assert result.medians()["base"]["e2e_p50"] == 1.0


def test_each_round_may_have_work_of_its_own_the_same_for_all() -> None:
    seen: list[tuple[str, Sequence[Work]]] = []

    class Watching(Scripted):
        def run(self, work: Sequence[Work]) -> list[Record]:
            seen.append((self.name, work))
            return super().run(work)

    targets = [Watching(name, [1.0, 1.0], []) for name in ("a", "b")]
    compare(targets, lambda number: fixed_lengths(4, 8, 5, seed=number), 2)
    assert [name for name, _ in seen] == ["a", "b", "b", "a"]
    assert seen[0][1] == seen[1][1] == WORK
    assert seen[2][1] == seen[3][1] == fixed_lengths(4, 8, 5, seed=1)


def test_a_round_in_which_a_target_had_no_times_is_in_no_ratio_of_times() -> None:
    class Failing(Scripted):
        def run(self, work: Sequence[Work]) -> list[Record]:
            records = super().run(work)
            lost = not self._seconds  # in its last round
            return [dataclasses.replace(record, error="gone" if lost else "") for record in records]

    result = compare([Scripted("base", [1.0] * 3, []), Failing("other", [4.0, 2.0, 1.0], [])], WORK, 3)
    assert result.ratios["other"]["ttft_p50"] == pytest.approx(3.0)


def test_one_target_or_two_of_a_name_cannot_be_compared() -> None:
    one = Scripted("one", [1.0], [])
    for targets in ([one], [one, one]):
        with pytest.raises(ValueError, match="different names"):
            compare(targets, WORK)


def test_a_report_can_be_read_by_any_json_reader_and_holds_every_record(tmp_path: Path) -> None:
    run = measure(Scripted("t", [1.0], []), WORK, {"ttft": 1.0})
    path = tmp_path / "deep" / "report.json"
    settings = {"seed": 0, "rate": float("inf")}
    report.write(path, report.document([run], settings, {"ratios": {"x": float("nan")}}))
    reported = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"not JSON: {text}"))
    assert reported["settings"] == {"seed": 0, "rate": None}
    assert reported["machine"]["cores"] >= 1
    assert reported["runs"][0]["summary"]["output_tokens"] == 20
    assert len(reported["runs"][0]["records"]) == 4
    assert reported["command"]


def test_a_report_hides_api_keys() -> None:
    command = [
        "bench",
        "--api-key",
        "secret",
        "--target",
        "http://h,api_key=secret,model=m",
        "--api-key=secret,with-secret-comma",
    ]
    assert "secret" not in " ".join(report.without_keys(command))
    assert "model=m" in " ".join(report.without_keys(command))


def test_the_table_names_every_target_and_figure() -> None:
    runs = [measure(Scripted(name, [1.0], []), WORK, {"tpot": 1.0}) for name in ("left", "right")]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(runs, "title"))
    text = console.export_text()
    for word in ("left", "right", "output tokens/s", "TTFT", "TPOT", "ITL", "E2E", "p99", "goodput"):
        assert word in text


def test_tenants_and_classes_have_tables_where_there_are_several() -> None:
    work = [Work("a", "hi", 1, tenant="acme"), Work("b", "hi", 1, service_class="flex")]
    records = [
        Record(w.id, 0.0, 2.0, (1.0, 2.0), 4, 2, tenant=w.tenant, service_class=w.service_class) for w in work
    ]
    run = report.Run("x", records, summarize(records, {"ttft": 1.5}))
    console = Console(record=True, width=160)
    for table in report.group_tables(run):
        console.print(table)
    shown = console.export_text()
    for words in ("x: classes", "flex", "x: tenants", "acme", "within SLO", "100.0 %"):
        assert words in shown
    single = [records[0]]
    assert report.group_tables(report.Run("x", single, summarize(single))) == []


def test_a_plot_is_written(tmp_path: Path) -> None:
    runs = [measure(Scripted(name, [1.0], []), WORK) for name in ("left", "right")]
    plot(runs, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_plot_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"headrace\[bench\]"):
        plot([], tmp_path / "plot.png", "title")
