from headrace.response_cache.rules.partial.unfinished_answers import (
    MIN_TOKENS,
    UnfinishedAnswer,
    UnfinishedAnswers,
)

KEY, TAGS = b"k" * 32, (("*", 0),)


def beginning(length: int, created: float = 0.0, expires: float = 100.0) -> UnfinishedAnswer:
    return UnfinishedAnswer(tuple(range(length)), 1.0, TAGS, created, expires)


def known(*kept: UnfinishedAnswer) -> UnfinishedAnswers:
    beginnings = UnfinishedAnswers(1 << 20)
    for each in kept:
        beginnings.keep(KEY, each)
    return beginnings


def test_the_longest_is_kept_and_of_equals_the_one_that_lives_longer():
    short, long = beginning(MIN_TOKENS), beginning(20)
    assert known(short, long).find(KEY, TAGS, 1.0) == known(long, short).find(KEY, TAGS, 1.0) == long
    newer = beginning(20, 50.0, 150.0)
    assert known(long, newer).find(KEY, TAGS, 60.0) == known(newer, long).find(KEY, TAGS, 60.0) == newer


def test_it_is_found_until_it_expires_and_within_max_age():
    one = beginning(20, 10.0, 100.0)
    assert known(one).find(KEY, TAGS, 99.0, max_age=90.0) == one
    assert known(one).find(KEY, TAGS, 99.0, max_age=80.0) is None
    assert known(one).find(KEY, TAGS, 100.0) is None
    assert known(one).find(KEY, TAGS, -100.0) is None
    assert known(one).find(KEY, (("*", 1),), 50.0) is None


def test_what_has_ended_makes_room_for_what_is_shorter():
    beginnings = known(beginning(20))
    assert beginnings.find(KEY, TAGS, 100.0) is None
    short = beginning(MIN_TOKENS, 100.0, 200.0)
    beginnings.keep(KEY, short)
    assert beginnings.find(KEY, TAGS, 150.0) == short


def test_a_wrong_one_is_forgotten():
    beginnings = known(beginning(20))
    beginnings.forget(KEY)
    beginnings.forget(KEY)
    assert beginnings.find(KEY, TAGS, 1.0) is None
    assert beginnings.counts()[:2] == (0, 0)
