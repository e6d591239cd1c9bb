from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from headrace.lab.workload.traces import BadTrace, read_trace
from headrace.lab.workload.work import Span, resampled, speedup

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 23:59:59.500000+00:00,2399,6\n2024-05-11 00:00:00+00:00,76,15\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n118,GPT-4,417,276,693,API log\n"
)
SERVEGEN = "timestamp_s,input_tokens,output_tokens\n0.0,201,6\n0.0003,9463,1271\n"
ARENA = "req_time_s,client,prompt_len,output_len\n0.0,13,13,199\n0.2079,2,36,137\n"


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE_2023, [(0.0, 374, 44, "default"), (4.314579, 396, 109, "default")]),
        (AZURE_2024, [(0.0, 2399, 6, "default"), (0.5, 76, 15, "default")]),
        (BURST, [(0.0, 472, 18, "ChatGPT"), (113.0, 417, 276, "GPT-4")]),
        (SERVEGEN, [(0.0, 201, 6, "default"), (0.0003, 9463, 1271, "default")]),
        (ARENA, [(0.0, 13, 199, "13"), (0.2079, 36, 137, "2")]),
    ],
    ids=["azure-2023", "azure-2024", "burstgpt", "servegen", "arena"],
)
def test_published_traces_are_known_by_their_header(tmp_path, text, expected):
    calls = list(read_trace(write(tmp_path, text)))
    assert [(pytest.approx(c.arrival, abs=1e-5), *c[1:4]) for c in calls] == expected


@pytest.mark.parametrize("zone", ["+00:00", "Z", "-05:00", "-0530", "+09:00", "-03"])
def test_a_timestamp_may_have_any_time_zone(tmp_path, zone):
    head = AZURE_2024.splitlines()[0]
    text = f"{head}\n2024-05-10 23:59:59.500000{zone},2399,6\n2024-05-11 00:00:00{zone},76,15\n"
    assert [call.arrival for call in read_trace(write(tmp_path, text))] == [0.0, 0.5]


def test_time_zones_in_one_trace_are_compared_in_utc(tmp_path):
    head = AZURE_2024.splitlines()[0]
    text = f"{head}\n2024-05-10 19:00:00-05:00,1,1\n2024-05-11 00:00:01,2,2\n2024-05-11 02:00:02+02:00,3,3\n"
    assert [call.arrival for call in read_trace(write(tmp_path, text))] == [0.0, 1.0, 2.0]


def test_blocks_of_mooncake_become_spans_of_content(tmp_path):
    path = write(tmp_path, mooncake((1000, 1100, 5, [7, 8, 9]), (3500, 512, 6, [7])))
    first, second = read_trace(path)
    assert first.content == (Span(7, 0, 512), Span(8, 0, 512), Span(9, 0, 76))
    assert second.content == (Span(7, 0, 512),)
    assert (first.arrival, second.arrival) == (0.0, 2.5)


def test_an_unknown_header_names_the_file_and_what_is_known(tmp_path):
    path = write(tmp_path, "when,what\n1,2\n")
    with pytest.raises(BadTrace, match=r"trace:1: unknown format.*ContextTokens"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SERVEGEN + "1.0,many,3\n", "trace:4: '1.0,many,3' cannot be read"),
        (SERVEGEN + "1.0,3\n", "trace:4: "),
        (SERVEGEN + "1.0,-3,3\n", "trace:4: .*-3 tokens"),
        (AZURE_2023 + "yesterday,3,3\n", "trace:4: "),
        (mooncake((0, 10, 5, [1])) + "{]\n", "trace:2: "),
        (
            mooncake((0, 10, 5, [1])) + '{"timestamp": 1}\n',
            "trace:2: cannot be read: no field 'input_length'",
        ),
        (SERVEGEN + "nan,3,3\n", "trace:4: .*finite time, got nan"),
        (SERVEGEN + "inf,3,3\n", "trace:4: .*finite time, got inf"),
        (mooncake((0, 10, 5, [1])).replace("10", "1e400"), "trace:1: cannot be read: "),
        (mooncake((0, 10, 5, [1, 2])), "trace:1: .*10 tokens do not make 2 blocks"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, text, message):
    with pytest.raises(BadTrace, match=message):
        list(read_trace(write(tmp_path, text)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SERVEGEN.encode() + b"1.0,3,\xe9\n", "trace: the file is not UTF-8 text"),
        (b"\x1f\x8b\x08\xff", "trace: the file is not UTF-8 text"),
        (SERVEGEN.encode() + b"1.0,3," + b"1" * 200_000, "trace: cannot be read as CSV: field larger"),
    ],
    ids=["in the middle", "from the start", "no end of a field"],
)
def test_a_file_that_is_no_text_is_an_error(tmp_path, content, message):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=message):
        list(read_trace(path))


def test_slight_disorder_is_mended_and_the_limit_counts_calls(tmp_path):
    path = write(tmp_path, "timestamp_s,input_tokens,output_tokens\n2.0,1,1\n1.0,2,2\n3.0,3,3\n")
    assert [(c.arrival, c.prompt_tokens) for c in read_trace(path, limit=2)] == [(0.0, 2), (1.0, 1)]


def test_large_disorder_of_arrivals_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.lab.workload.traces.DISORDER", 2)
    path = write(
        tmp_path, "timestamp_s,input_tokens,output_tokens\n" + "".join(f"{9 - i},1,1\n" for i in range(9))
    )
    with pytest.raises(BadTrace, match="sort the file"):
        list(read_trace(path))


def test_a_speedup_divides_times_and_nothing_else(tmp_path):
    path = write(tmp_path, ARENA)
    assert [c.arrival for c in speedup(read_trace(path), 2.0)] == [0.0, 0.2079 / 2]
    with pytest.raises(ValueError, match="above 0"):
        speedup([], 0.0)


def test_a_longer_trace_has_the_calls_and_the_pace_of_the_short_one(tmp_path):
    lines = "".join(f"{i * 0.5},{i + 1},{2 * i + 1}\n" for i in range(200))
    calls = list(read_trace(write(tmp_path, "timestamp_s,input_tokens,output_tokens\n" + lines)))
    more = list(resampled(calls, 5000, seed=3))
    assert len(more) == 5000
    assert more == list(resampled(calls, 5000, seed=3))
    assert more != list(resampled(calls, 5000, seed=4))
    assert {call[1:3] for call in more} <= {call[1:3] for call in calls}
    times = [call.arrival for call in more]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] / 4999 == pytest.approx(0.5, rel=0.02)
    assert list(islice(resampled(calls, 1), 2)) != []
    with pytest.raises(ValueError, match="the trace has no requests"):
        resampled([], 1)  # told at once, not when the first is drawn
