from __future__ import annotations

import random
from itertools import islice, pairwise

import pytest

from headrace.lab.workload.population import (
    DEPTH,
    BadPopulation,
    calls,
    diurnal,
    gamma_process,
    length,
    modulated,
    parse,
)


def times(process, count: int = 20_000) -> list[float]:
    return list(islice(process, count))


def variation(values: list[float]) -> float:
    """Coefficient of variation of the gaps, squared: 1 for a Poisson process."""
    gaps = [later - earlier for earlier, later in pairwise(values)]
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2


@pytest.mark.parametrize(
    ("process", "low", "high"),
    [
        (lambda rng: gamma_process(5.0, rng), 0.9, 1.1),
        (lambda rng: gamma_process(5.0, rng, burstiness=0.25), 3.4, 4.6),
        (lambda rng: modulated(5.0, rng, ratio=9.0, stay=10.0), 1.5, 9.0),
    ],
    ids=["poisson", "gamma", "mmpp"],
)
def test_arrivals_keep_their_rate_and_their_burstiness(process, low, high):
    drawn = times(process(random.Random(1)))
    assert drawn == sorted(drawn)
    assert len(drawn) / drawn[-1] == pytest.approx(5.0, rel=0.1)
    assert low < variation(drawn) < high


def test_a_day_has_its_crest_at_the_hour_asked_for():
    drawn = [at for at in times(diurnal(0.5, random.Random(2), peak_hour=15.0), 60_000) if at < 86_400.0]
    by_hour = [sum(hour <= at / 3600.0 < hour + 1 for at in drawn) / 1800.0 for hour in range(24)]
    assert max(by_hour[14:16]) == pytest.approx(1 + DEPTH, rel=0.1)
    assert min(by_hour[2:4]) == pytest.approx(1 - DEPTH, rel=0.25)
    assert len(drawn) / 86_400.0 == pytest.approx(0.5, rel=0.03)


def test_lengths_by_name():
    rng = random.Random(0)
    assert {length("200")(rng) for _ in range(5)} == {200}
    uniform = [length("uniform:50:60")(rng) for _ in range(500)]
    assert (min(uniform), max(uniform)) == (50, 60)
    drawn = sorted(length("lognormal:800:1.0")(rng) for _ in range(2001))
    assert drawn[1000] == pytest.approx(800, rel=0.1)
    assert drawn[-1] > 4000


@pytest.mark.parametrize(
    "text",
    [
        *("0", "x", "uniform:5:1", "uniform:5", "lognormal:0:1", "lognormal:5:1:2", ""),
        *("inf", "1e400", "uniform:1:inf", "lognormal:inf:1", "lognormal:5:inf"),
    ],
)
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="with lengths of at least 1 token"):
        length(text)


def test_a_spread_beyond_all_numbers_is_cut_like_any_other():
    drawn = {length("lognormal:10:5000")(random.Random(seed)) for seed in range(50)}
    assert drawn == {1, 320}


def test_each_turn_contains_the_turns_before_it_and_their_answers():
    tenant = parse("tenant=chat,rate=1,turns=5,system=100,prompt=20,answer=7,think=3")
    drawn = list(calls([tenant], 400, seed=1))
    assert [call.arrival for call in drawn] == sorted(call.arrival for call in drawn)
    turns: dict[int, list] = {}
    for call in drawn:
        system, spoken = call.content
        assert system == drawn[0].content[0]
        assert call.prompt_tokens == 100 + spoken.length
        assert call.answer == (spoken.stream, spoken.length, 7)
        turns.setdefault(spoken.stream, []).append(spoken.length)
    assert all(lengths == [20 + 27 * i for i in range(len(lengths))] for lengths in turns.values())
    assert 3.0 < sum(map(len, turns.values())) / len(turns) < 6.0


def test_tenants_come_together_in_order_and_apart_in_content():
    tenants = [parse("tenant=a,rate=3,class=priority"), parse("tenant=b,rate=1,arrivals=bursty:0.5")]
    drawn = list(calls(tenants, 4000, seed=2))
    assert [call.arrival for call in drawn] == sorted(call.arrival for call in drawn)
    shares = [sum(call.tenant == name for call in drawn) / 4000 for name in "ab"]
    assert shares == pytest.approx([0.75, 0.25], abs=0.03)
    assert {call.service_class for call in drawn if call.tenant == "a"} == {"priority"}
    assert len({call.content for call in drawn}) == 4000
    assert drawn == list(calls(tenants, 4000, seed=2))
    assert drawn != list(calls(tenants, 4000, seed=3))


def test_lengths_may_be_those_of_a_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,100,1\n1,200,2\n")
    drawn = calls([parse(f"lengths={path}")], 100)
    assert {(call.prompt_tokens, call.output_tokens) for call in drawn} == {(100, 1), (200, 2)}


def test_a_trace_without_calls_has_no_lengths_to_draw(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n")
    with pytest.raises(BadPopulation, match="no calls"):
        parse(f"lengths={path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate", "expected KEY=VALUE .*, got 'rate'"),
        ("speed=3", "expected KEY=VALUE .*, got 'speed=3'"),
        ("rate=0", "rate must be at least"),
        ("turns=0.5", "turns must be at least 1"),
        ("arrivals=sometimes", "expected poisson"),
        ("arrivals=bursty", "expected poisson"),
        ("prompt=none", "expected N .fixed., uniform"),
        ("lengths=/nowhere/at/all", "No such file"),
    ],
)
def test_a_tenant_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(BadPopulation, match=message):
        parse(text)
