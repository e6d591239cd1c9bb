"""The seeds of a call's choices."""

from headrace.core.request import SEED_BITS, choice_seed


def test_the_first_choice_has_the_seed_of_the_call() -> None:
    assert [choice_seed(seed, 0) for seed in (0, 7, 2**63 + 1, -1)] == [0, 7, 1, 2**63 - 1]


def test_no_choice_repeats_one_of_another_call() -> None:
    seeds = [choice_seed(seed, index) for seed in range(200) for index in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**SEED_BITS for seed in seeds)
    assert choice_seed(-5, 3) != choice_seed(5, 3)
