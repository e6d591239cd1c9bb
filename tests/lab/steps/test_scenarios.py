"""Small simulations, and what each stop of the tour promises."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.lab.tour import STOPS, Asked, BadScenario, Scenario, name
from headrace.wiring.step_documents import simulated_steps, tour
from tests.observe.steps.trace_events import check_order, check_trace

FILMS: dict[tuple[str, int], dict] = {}


def film(stop_name: str, run: int = 0) -> dict:
    """The film of a run of a stop; each is made once."""
    if (stop_name, run) not in FILMS:
        [stop] = [each for each in STOPS if each.name == stop_name]
        FILMS[stop_name, run] = simulated_steps(stop.runs[run][1])
    return FILMS[stop_name, run]


@pytest.mark.parametrize(("stop", "run"), [(stop.name, i) for stop in STOPS for i in range(len(stop.runs))])
def test_each_run_of_the_tour_ends_and_fits_a_page(stop, run):
    shown = film(stop, run)
    assert not shown["cut"]
    assert all(each["finish"] == "length" for each in shown["requests"])
    assert 5 < len(shown["steps"]) <= 200
    check_order([time for step in shown["steps"] for time in (step["began"], step["ended"])])
    for step in shown["steps"]:
        memory = step["memory"]
        held = sum(memory["cells"].count(letter) for letter in "uks")
        assert held == memory["held"] == step["blocks_held"]
        tables = memory["tables"]
        used = {block for table in tables.values() for block in table}
        assert all(memory["cells"][block] in "uks" for block in used)
        assert memory["cells"].count("s") == sum(
            sum(block in table for table in tables.values()) > 1 for block in used
        )


def test_continuous_batching_ends_sooner_than_static():
    static, continuous = film("continuous-batching", 0)["summary"], film("continuous-batching", 1)["summary"]
    assert static["output_tokens"] == continuous["output_tokens"]
    assert continuous["seconds"] < 0.85 * static["seconds"]
    assert continuous["mean_rows"] > static["mean_rows"]
    assert continuous["mean_ttft_seconds"] < static["mean_ttft_seconds"]


def test_a_static_batch_leaves_slots_empty_while_requests_wait():
    assert any(len(step["rows"]) < 4 and step["waiting"] for step in film("static-batching")["steps"])


def test_blocks_of_a_request_are_no_neighbours():
    tables = [table for step in film("paged-kv")["steps"] for table in step["memory"]["tables"].values()]
    assert any(abs(a - b) > 1 for table in tables for a, b in pairwise(table))


def test_shared_prefixes_are_computed_once():
    without, shared = film("prefix-sharing", 0), film("prefix-sharing", 1)
    assert shared["summary"]["computed_tokens"] < 0.5 * without["summary"]["computed_tokens"]
    assert [each["cached_tokens"] for each in shared["requests"]] == [0, 180, 180, 180]
    cells = "".join(step["memory"]["cells"] for step in shared["steps"])
    assert "s" in cells
    assert "k" in cells
    assert not set("sk") & set("".join(step["memory"]["cells"] for step in without["steps"]))


def test_blocks_of_an_ended_request_are_found_unless_memory_was_short():
    found, lost = film("caches", 0), film("caches", 1)
    [kept], [left] = (
        [r["cached_tokens"] for r in each["requests"] if r["id"] == "B"] for each in (found, lost)
    )
    assert kept == 400
    assert left < kept
    assert found["summary"]["computed_tokens"] < lost["summary"]["computed_tokens"]


def test_a_lower_priority_number_starts_sooner():
    def first_step(run: int) -> int:
        steps = film("priorities", run)["steps"]
        return next(at for at, step in enumerate(steps) if any(row["id"] == "G" for row in step["rows"]))

    assert first_step(1) < first_step(0)


def test_a_cached_prompt_computes_little():
    by_id = {each["id"]: each["cached_tokens"] for each in film("cost")["requests"]}
    assert by_id == {"A": 0, "B": 1100, "C": 0}


def test_chunks_keep_steps_short():
    whole, chunked = (film("chunked-prefill", run)["steps"] for run in (0, 1))
    longest = [max(step["ended"] - step["began"] for step in steps) for steps in (whole, chunked)]
    assert longest[1] < 0.3 * longest[0]
    chunks = [
        row for step in chunked for row in step["rows"] if row["id"] == "D" and row["kind"] == "prefill"
    ]
    assert len(chunks) > 4
    assert sum(row["length"] for row in chunks) == 4000


def test_a_request_is_preempted_and_resumes():
    shown = film("preemption")
    assert shown["summary"]["preemptions"] >= 1
    reported = [(each["id"], each["event"]) for step in shown["steps"] for each in step["events"]]
    victim = next(name for name, event in reported if event == "preempted")
    assert (victim, "resumed") in reported
    assert any("preempted" in each["why"] for step in shown["steps"] for each in step["queue"])


def test_drafts_save_steps():
    without, drafted = (film("drafts", run)["summary"] for run in (0, 1))
    assert drafted["output_tokens"] == without["output_tokens"]
    assert drafted["steps"] < 0.6 * without["steps"]
    rows = [row for step in film("drafts", 1)["steps"] for row in step["rows"]]
    assert any(row.get("accepted") for row in rows)


def test_a_simulation_is_a_trace_too():
    check_trace(simulated_steps(STOPS[5].runs[0][1], "perfetto"))


def test_the_tour_has_bodies_that_the_endpoint_takes():
    stops = tour()
    assert len({stop["name"] for stop in stops}) == len(stops) >= 6
    assert all(stop["title"] and stop["text"] and stop["look_at"] and stop["runs"] for stop in stops)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("requests", {"requests": ()}),
        ("requests", {"requests": (Asked(1, 1),) * 33}),
        ("requests", {"requests": (Asked(4096, 1),) * 5}),
        ("requests", {"requests": (Asked(8, 256),) * 5}),
        ("requests[0].prompt_tokens", {"requests": (Asked(0, 1),)}),
        ("requests[0].output_tokens", {"requests": (Asked(1, 257),)}),
        ("requests[1].shared_tokens", {"requests": (Asked(8, 1), Asked(8, 1, shared_tokens=9))}),
        ("requests[0].arrival", {"requests": (Asked(8, 1, arrival=-1.0),)}),
        ("max_num_seqs", {"max_num_seqs": 0}),
        ("max_num_batched_tokens", {"max_num_batched_tokens": 1}),
        ("num_blocks", {"num_blocks": 2000}),
        ("num_blocks", {"num_blocks": 1, "requests": (Asked(16, 1),)}),
        ("num_speculative_tokens", {"num_speculative_tokens": 17}),
        (
            "max_num_batched_tokens",
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "requests": (Asked(64, 1),)},
        ),
    ],
)
def test_a_scenario_beyond_its_bounds_names_the_field(field, changes):
    with pytest.raises(BadScenario) as caught:
        simulated_steps(Scenario(**{"requests": (Asked(8, 2),), **changes}))
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_names_of_requests_are_distinct():
    names = [name(i) for i in range(32)]
    assert names[0] == "A"
    assert len(set(names)) == 32
