"""The headline figures: the record is complete and agrees with itself, and the simulated part runs."""

from __future__ import annotations

import json

import pytest

from benchmarks.headline import simulated
from benchmarks.headline.record import CLAIMS, RECORD, Figure, claims, read, recorded, row, short, write

TINY = simulated.Size(40, (8, 32), 4)


def test_the_table_of_claims_is_made_of_the_recorded_figures():
    assert json.loads(RECORD.read_text(encoding="utf-8"))["claims"] == claims(read(RECORD))


def test_the_published_figures_are_cells_of_the_results_page():
    results = json.loads((RECORD.parent / "results.json").read_text(encoding="utf-8"))
    found = {table["id"]: table["rows"] for section in results["sections"] for table in section["tables"]}
    levels, drafts = found["cache-levels"], found["drafts-text"]
    similar_hits, requests = levels[4][5], levels[2][7]
    expected = [
        *(("static", row[2]) for row in found["batching-baselines"]),
        ("hits", found["semantic"][4][2]),
        ("hits", 100.0 * similar_hits / requests),
        ("prompt", 100.0 * (1.0 - levels[1][1] / levels[0][1])),
        *(("drafts", row[3]) for row in drafts if row[2] == 1),
    ]
    figures = read(RECORD)["published, published"]["figures"]
    assert [(each["claim"], each["value"]) for each in figures] == expected


def test_a_figure_that_misses_its_claim_has_a_reason():
    for part in read(RECORD).values():
        for each in part["figures"]:
            figure = Figure(**each)
            claim = CLAIMS[figure.claim]
            value = short(figure.value)
            worse = value > claim.most if claim.small else value < claim.least
            assert bool(row(figure)[-1]) == worse, each


def test_the_record_has_all_simulated_figures():
    parts = read(RECORD)
    assert [name for name in parts if name.startswith("simulated")] == [
        f"simulated, {call.__name__}" for call in simulated.PARTS
    ]


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, 0), (1.234, 1.23), (1234.5, 1230), (2.0, 2), (-0.5, -0.5)]
)
def test_numbers_have_three_digits(value, shown):
    assert short(value) == shown
    assert type(short(value)) is type(shown)


def test_the_step_tables_are_those_of_the_record_on_every_machine():
    part = read(RECORD)["simulated, steps"]
    assert recorded(part, simulated.steps(TINY))["tables"] == part["tables"]


def test_paged_memory_runs_more_requests_than_reservation():
    part = read(RECORD)["simulated, memory"]
    found = recorded(part, simulated.memory(TINY))
    by_claim = {each["claim"]: each["value"] for each in found["figures"]}
    assert by_claim["paged"] < by_claim["waste"]
    assert by_claim["concurrent"] >= 1
    for table, words in zip(found["tables"], part["tables"], strict=True):
        assert table["rows"]
        assert {name: each for name, each in table.items() if name != "rows"} == {
            name: each for name, each in words.items() if name != "rows"
        }


def test_written_figures_are_read_again(tmp_path):
    parts = {"simulated, x": {"figures": [Figure("int8", 2.0, "here", "so")._asdict()], "tables": []}}
    write(tmp_path / "record.json", parts)
    assert read(tmp_path / "record.json") == parts
    assert json.loads((tmp_path / "record.json").read_text())["claims"]["rows"][0][3] == 2
