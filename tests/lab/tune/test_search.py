import math

import pytest

from headrace.lab.tune import feasible, search, space

PRESENT = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "mixed_prefill_ratio": 0.7,
    "max_step_seconds": 0.1,
}


def score(settings):
    """Best with 16 slots and a ratio of 2.5."""
    return -abs(math.log2(settings["max_num_seqs"] / 16)) - abs(settings["mixed_prefill_ratio"] - 2.5)


def test_the_space_is_ordered_and_holds_the_present_settings():
    found = space({**PRESENT, "mixed_prefill_ratio": 0.33})
    for name, values in found.items():
        assert ({**PRESENT, "mixed_prefill_ratio": 0.33})[name] in values
    assert found["mixed_prefill_ratio"][:4] == [0.1, 0.2, 0.33, 0.4]
    assert found["mixed_prefill_ratio"][-1] == 0.0, "no limit is beyond the largest"
    assert space({**PRESENT, "max_num_seqs": 1})["max_num_seqs"] == [1, 2, 4]


def test_a_step_holds_all_running_sequences():
    assert feasible({"max_num_seqs": 256, "max_num_batched_tokens": 128})["max_num_batched_tokens"] == 256


def test_the_search_finds_the_best_and_tries_the_present_settings_first():
    pytest.importorskip("optuna")
    tried = []

    def watched(settings):
        tried.append(dict(settings))
        return score(settings)

    found = search(watched, space(PRESENT), PRESENT, 40, 0)
    assert tried[0] == PRESENT
    assert len(tried) == len({tuple(each.values()) for each in tried}), "equal settings are tried once"
    assert found[0].score > score(PRESENT) + 2.0
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)


def test_equal_seeds_give_equal_searches_and_time_ends_them():
    pytest.importorskip("optuna")
    one, two, other = (search(score, space(PRESENT), PRESENT, 12, seed) for seed in (1, 1, 2))
    assert one == two != other
    assert len(search(score, space(PRESENT), PRESENT, 12, 1, lambda: False)) == 1
