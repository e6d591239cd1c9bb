from __future__ import annotations

import pytest

from headrace.core.memory.retention import UNSET_RETENTION, BlockRetention, block_retention
from headrace.core.request import Retention
from tests.doubles.scenes import request


def kept(*retention: Retention, tokens: int = 16, blocks: int = 5) -> list[BlockRetention]:
    return block_retention(request("r", tokens, retention=retention), 4, blocks)


def test_without_retention_every_block_has_the_default():
    assert kept() == [UNSET_RETENTION] * 5


def test_a_range_keeps_its_blocks_and_all_before_them():
    assert kept(Retention(8, 12, 80)) == [BlockRetention(80)] * 3 + [UNSET_RETENTION] * 2


def test_a_block_that_touches_the_range_belongs_to_it():
    assert kept(Retention(0, 5, 80)) == [BlockRetention(80)] * 2 + [UNSET_RETENTION] * 3
    assert kept(Retention(7, 8, 80)) == [BlockRetention(80)] * 2 + [UNSET_RETENTION] * 3


def test_the_answer_follows_the_end_of_the_prompt():
    assert kept(Retention(0, None, 5)) == [BlockRetention(5)] * 5
    assert kept(Retention(12, None, 90, 60.0)) == [BlockRetention(90, 60.0)] * 5


@pytest.mark.parametrize("end", [4, 8])
def test_what_comes_before_something_kept_cannot_be_given_up(end):
    assert kept(Retention(0, end, 5)) == [UNSET_RETENTION] * 5, "the rest has the default, and needs its head"


def test_higher_then_longer_wins():
    assert kept(Retention(0, 4, 80, 5.0), Retention(8, 12, 50), Retention(0, 4, 80, 9.0)) == [
        BlockRetention(80, 9.0),
        BlockRetention(50),
        BlockRetention(50),
        UNSET_RETENTION,
        UNSET_RETENTION,
    ]
    assert kept(Retention(0, 4, 80, 5.0), Retention(0, 4, 80))[0] == BlockRetention(80)


def test_a_range_beyond_the_prompt_means_nothing():
    assert kept(Retention(16, 40, 80)) == [UNSET_RETENTION] * 5


def test_fewer_blocks_than_the_prompt_has():
    assert kept(Retention(12, None, 80), blocks=2) == [UNSET_RETENTION] * 2, "its end is not there"
    assert kept(Retention(0, 8, 80), blocks=0) == []
