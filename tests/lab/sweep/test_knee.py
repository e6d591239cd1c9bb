import math

import pytest

from headrace.lab.sweep import knee


def test_the_knee_is_the_smallest_value_of_the_plateau():
    found = knee([1, 2, 4, 8, 16], [100, 190, 350, 391, 400], [0.01, 0.011, 0.012, 0.02, 0.04])
    assert (found.value, found.last, found.found) == (8, 16, True)
    assert found.gain == pytest.approx(400 / 391)
    assert found.slower == pytest.approx(2.0)
    assert found.sentence("batch size", "TPOT p50") == (
        "batch size: the knee is 8, with 391 output tokens/s. 16 adds 2 % of throughput and has 2.0 times the TPOT p50."
    )


def test_a_curve_that_still_rises_has_no_plateau():
    found = knee([1, 2, 4], [100, 200, 390], [1, 1, 1])
    assert not found.found
    assert found.sentence("batch size", "TPOT p50").startswith("batch size: no plateau up to 4")
    assert "adds 95 %" in found.sentence("batch size", "TPOT p50")


def test_throughput_that_falls_behind_the_knee_is_said():
    found = knee([8, 16, 32], [100, 300, 240], [1.0, 1.0, 1.5])
    assert found.value == 16
    assert found.found
    assert "32 loses 20 %" in found.sentence("chunk size", "ITL p99")


def test_a_flat_curve_begins_with_its_knee():
    assert knee([64, 128, 256], [100, 99, 101], [1, 1, 1]).value == 64


def test_a_plateau_that_ends_at_the_last_value_says_so():
    found = knee([1, 2, 4], [50, 92, 96.5], [1, 1, 1])
    assert (found.value, found.found) == (2, True)
    last = knee([1, 2, 4], [50, 96, 101.1], [1, 1, 1])
    assert last.value == 4 if 96 < 0.95 * 101.1 else last.value == 2


def test_one_value_is_no_curve():
    found = knee([4], [100], [1])
    assert math.isnan(found.growth)
    assert not found.found
    assert found.sentence("batch size", "TPOT p50") == "batch size: only 4 was measured."
    with pytest.raises(ValueError, match="at least one"):
        knee([], [], [])
