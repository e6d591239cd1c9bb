from __future__ import annotations

import pytest

from headrace.core.memory.retention import NOTHING_SAID, Kept, kept_blocks
from headrace.core.request import Retention
from tests.doubles.scenes import request


def kept(*retention: Retention, tokens: int = 16, blocks: int = 5) -> list[Kept]:
    return kept_blocks(request("r", tokens, retention=retention), 4, blocks)


def test_without_a_wish_every_block_has_the_default():
    assert kept() == [NOTHING_SAID] * 5


def test_a_range_keeps_its_blocks_and_all_before_them():
    assert kept(Retention(8, 12, 80)) == [Kept(80)] * 3 + [NOTHING_SAID] * 2


def test_a_block_that_touches_the_range_belongs_to_it():
    assert kept(Retention(0, 5, 80)) == [Kept(80)] * 2 + [NOTHING_SAID] * 3
    assert kept(Retention(7, 8, 80)) == [Kept(80)] * 2 + [NOTHING_SAID] * 3


def test_the_answer_follows_the_end_of_the_prompt():
    assert kept(Retention(0, None, 5)) == [Kept(5)] * 5
    assert kept(Retention(12, None, 90, 60.0)) == [Kept(90, 60.0)] * 5


@pytest.mark.parametrize("end", [4, 8])
def test_what_comes_before_something_kept_cannot_be_given_up(end):
    assert kept(Retention(0, end, 5)) == [NOTHING_SAID] * 5, "the rest has the default, and needs its head"


def test_higher_then_longer_wins():
    assert kept(Retention(0, 4, 80, 5.0), Retention(8, 12, 50), Retention(0, 4, 80, 9.0)) == [
        Kept(80, 9.0),
        Kept(50),
        Kept(50),
        NOTHING_SAID,
        NOTHING_SAID,
    ]
    assert kept(Retention(0, 4, 80, 5.0), Retention(0, 4, 80))[0] == Kept(80)


def test_a_range_beyond_the_prompt_means_nothing():
    assert kept(Retention(16, 40, 80)) == [NOTHING_SAID] * 5


def test_fewer_blocks_than_the_prompt_has():
    assert kept(Retention(12, None, 80), blocks=2) == [NOTHING_SAID] * 2, "its end is not there"
    assert kept(Retention(0, 8, 80), blocks=0) == []
