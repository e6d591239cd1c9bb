import pytest

from headrace.lab.tune import LEAST_WINDOWS, TooFew, parts, spread_out
from headrace.lab.workload.work import Call


def calls(count, gap=1.0):
    return [Call(gap * i, 10, i + 1) for i in range(count)]


def test_parts_follow_each_other_and_share_no_request():
    found = parts(calls(1000), 20.0)
    ids = [[call.output_tokens for window in part for call in window] for part in found]
    assert max(ids[0]) < min(ids[1]) <= max(ids[1]) < min(ids[2])
    assert len(found.search) == 19
    for part in found:
        for window in part:
            assert 0.0 <= window[0].arrival < 1.0
            assert window[-1].arrival < 20.0


def test_windows_of_a_short_part_are_shorter():
    found = parts(calls(200), 3600.0)
    assert [len(part) for part in found] == list(LEAST_WINDOWS)


@pytest.mark.parametrize("gap", [1.0, 0.1, 1 / 3])
def test_the_last_request_is_held_out_too(gap):
    judge = parts(calls(200, gap), 3600.0).judge
    assert [call.output_tokens for window in judge for call in window] == list(range(111, 201))


def test_a_workload_that_cannot_be_judged_is_refused_with_what_it_needs():
    with pytest.raises(TooFew, match="at least 200 requests"):
        parts(calls(50), 20.0)
    with pytest.raises(TooFew):
        parts([], 20.0)
    with pytest.raises(TooFew):
        parts([Call(0.0, 1, 1)] * 500, 20.0)


def test_the_search_sees_windows_of_the_whole_part():
    windows = [calls(10) for _ in range(20)]
    assert len(spread_out(windows, 10_000)) == 20
    assert len(spread_out(windows, 50)) == 5
    assert len(spread_out(windows, 1)) == 1
