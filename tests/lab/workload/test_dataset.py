from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import pytest

from headrace.lab.workload.dataset import (
    DATASETS,
    BadDataset,
    BadLine,
    Dataset,
    jsonl,
    long_among_decoders,
    shared_prefix,
)
from headrace.lab.workload.population import log_normal, poisson
from headrace.lab.workload.work import Message

DRAWN = [name for name in DATASETS if name not in ("jsonl", "trace")]


@pytest.mark.parametrize("name", DRAWN)
def test_equal_seeds_draw_equal_workloads_and_others_others(name: str) -> None:
    dataset = Dataset(name, count=50, seed=3, rate=10.0)
    assert dataset.draw() == dataset.draw()
    assert dataset.draw() != dataclasses.replace(dataset, seed=4).draw()
    assert len({work.id for work in dataset.draw()}) == 50


def test_high_variance_keeps_its_promise_exactly() -> None:
    work = Dataset("high-variance", count=300).draw()
    lengths = [each.max_tokens for each in work]
    assert sum(length < 30 for length in lengths) == 240
    assert sum(length > 800 for length in lengths) == 12
    assert all(each.ignore_eos for each in work)
    assert max(lengths[:150]) > 200, "long answers must lie among the short ones, not behind them"


def test_high_variance_chats_have_the_same_shares_and_end_by_themselves() -> None:
    work = Dataset("high-variance-chats", count=300).draw()
    kinds = [each.expect for each in work]
    assert (kinds.count("short"), kinds.count("middle"), kinds.count("long")) == (240, 48, 12)
    assert not any(each.ignore_eos for each in work)


def test_fixed_and_log_normal_lengths() -> None:
    fixed = Dataset("fixed", count=3, input_len=7, output_len=9).draw()
    assert [(len(each.prompt), each.max_tokens) for each in fixed] == [(7, 9)] * 3
    drawn = log_normal(2001, median=100, sigma=0.8, low=1, high=800, rng=random.Random(0))
    assert 90 < sorted(drawn)[1000] < 110
    assert min(drawn) >= 1
    assert max(drawn) <= 800


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    work = shared_prefix(4, prefix_len=100, input_len=8)
    assert len({each.prompt[:100] for each in work}) == 1
    assert len({each.prompt[100:] for each in work}) == 4


def test_the_long_prompt_comes_last_and_later() -> None:
    *streams, intruder = long_among_decoders(decoders=16, long_len=4000, arrival=2.0)
    assert len(streams) == 16
    assert (len(intruder.prompt), intruder.arrival, intruder.expect) == (4000, 2.0, "intruder")


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_ascend_at_the_rate(burstiness: float) -> None:
    times = poisson(400, rate=20.0, seed=1, burstiness=burstiness)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20.0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.35)
    assert poisson(3, math.inf, seed=0) == [0.0, 0.0, 0.0]


def test_files_of_every_known_shape(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
        {"turns": ["first", "second"]},
        {"question": "why", "answer": "so"},
        {"prompt": "def f():"},
        {"prompt": [1, 2, 3]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    work = jsonl(path, 5, output_len=64)
    assert {each.prompt for each in work} == {
        (Message("user", "hello"),),
        (Message("user", "first"),),
        (Message("user", "why"),),
        "def f():",
        (1, 2, 3),
    }
    assert sorted(each.max_tokens for each in work) == [5, 64, 64, 64, 64]
    assert len(jsonl(path, 12, output_len=1)) == 12


def test_a_line_may_name_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "tenant": "acme", "service_tier": "flex"}))
    (work,) = jsonl(path, 1, output_len=1)
    assert (work.tenant, work.service_class) == ("acme", "flex")


@pytest.mark.parametrize("line", ["{", "[]", '{"other": 1}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BadLine, match=r"prompts.jsonl:1"):
        jsonl(path, 1, output_len=1)


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(BadDataset, match="high-variance"):
        Dataset("nothing").draw()
    with pytest.raises(BadDataset, match="path"):
        Dataset("jsonl").draw()


def test_a_trace_comes_at_its_own_times_unless_a_rate_is_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,5,3\n2,6,4\n4,7,5\n")
    work = Dataset("trace", str(path), count=2).draw()
    assert [(each.arrival, len(each.prompt), each.max_tokens) for each in work] == [(0.0, 5, 3), (2.0, 6, 4)]
    denser = Dataset("trace", str(path), count=3, rate=10.0).draw()
    assert denser[-1].arrival == pytest.approx(0.3)
    with pytest.raises(BadDataset, match="needs a file"):
        Dataset("trace").draw()
    path.write_text("what\n")
    with pytest.raises(BadDataset, match="unknown format"):
        Dataset("trace", str(path)).draw()
