"""The rules of the trace-event format that an exported trace must keep."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
    "i": {"name", "ph", "pid", "tid", "ts", "s", "args"},
}


def check_trace(trace: dict[str, Any]) -> None:
    """Schema, times, names of tracks, and slices that nest."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    named, used = set(), set()
    for event in events:
        assert event.keys() == FIELDS[event["ph"]], event
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            named.add((event["pid"], event["tid"]))
            continue
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            used.add((event["pid"], event["tid"]))
    assert used <= named
    for track in used:
        check_nesting([e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track])


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Of two slices of a track, one contains the other or they do not overlap."""
    open_ends: list[int] = []
    for each in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        end = each["ts"] + each["dur"]
        while open_ends and open_ends[-1] <= each["ts"]:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], each
        open_ends.append(end)


def check_order(times: list[float]) -> None:
    """Times do not go back."""
    assert all(a <= b for a, b in pairwise(times))
