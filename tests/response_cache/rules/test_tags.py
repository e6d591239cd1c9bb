from headrace.response_cache.rules.key import slot_key, slot_served
from headrace.response_cache.rules.tags import (
    COUNTERS,
    EVERYTHING,
    TagVersions,
    counter_of,
    tenant_tag,
    user_tag,
)


def test_what_was_taken_before_a_clearing_is_not_current():
    versions = TagVersions()
    before = versions.snapshot(["a", "b"])
    assert versions.current(before)
    versions.raise_("b")
    assert not versions.current(before)
    assert versions.current(versions.snapshot(["a", "b"]))
    assert versions.current(versions.snapshot(["a"]))


def test_clearings_elsewhere_are_learnt_and_never_unlearnt():
    versions = TagVersions()
    a, b = versions.raise_("a"), counter_of("b")
    assert versions.merge({a: 1, b: 2}, {}) == [b]
    assert versions.merge({a: 0, b: 1}, {}) == []
    assert versions.snapshot(["a", "b"]) == ((a, 1), (b, 2))


def test_what_was_lost_elsewhere_counts_as_cleared():
    versions = TagVersions()
    a, b, c = map(counter_of, "abc")
    versions.merge({a: 5, b: 2, c: 1}, {})
    assert versions.merge({a: 1, b: 3}, {a: 5, b: 2, c: 1}) == [b, a, c]
    assert versions.snapshot("abc") == ((a, 6), (b, 3), (c, 2))
    assert versions.ahead_of({a: 1, b: 3}) == {a: 5, c: 2}
    assert versions.ahead_of({a: 6, b: 9, c: 2}) == {}


def test_an_entry_of_a_version_that_is_not_known_here_is_not_current():
    assert not TagVersions().current((("a", 1),))


def test_any_number_of_invalidated_tags_takes_a_fixed_number_of_counters():
    versions = TagVersions()
    old = versions.snapshot([EVERYTHING, user_tag("a", "news")])
    untouched = versions.snapshot([EVERYTHING, tenant_tag("a")])
    versions.raise_(user_tag("a", "news"))
    for i in range(5 * COUNTERS):
        versions.raise_(user_tag("b", str(i)))
        assert not versions.current(old)
    assert len(versions.ahead_of({})) <= COUNTERS
    assert versions.current(untouched)  # tags of tenants have counters of their own, and so has everything
    versions.raise_(EVERYTHING)
    assert not versions.current(untouched)


def test_a_tag_has_the_same_counter_in_every_process():
    assert counter_of(user_tag("a", "news")) == "tag:1739"
    assert counter_of(tenant_tag("\ud800")).startswith("tenant:")


def test_two_tenants_tags_are_two_tags():
    assert user_tag("ann", "x:y") != user_tag("ann:x", "y")
    assert user_tag("1", "1:x") != user_tag("11", "x")
    assert tenant_tag("tag:1:a:b") != user_tag("a", "b")


def test_a_calls_answers_are_different_samples():
    assert len({slot_served(seed, 8) for seed in range(123, 131)}) == 8
    assert len({slot_key(b"k" * 32, slot) for slot in range(64)} | {b"k" * 32}) == 65
