import pytest

from headrace.tuning.traffic import Forecaster, Job, Period


def period(began, tokens, parts=3, seconds=60.0):
    """A period whose tokens arrive in some requests, after one that was open before."""
    jobs = [Job(began + (1 + i) * seconds / (1 + parts), tokens // parts - 10, 0, 10) for i in range(parts)]
    return Period(began, began + seconds, [Job(began, 0, 50, 5), *jobs])


def forecaster(*loads):
    made = Forecaster(60.0)
    for number, load in enumerate(loads):
        made.add(period(60.0 * number, load * 60))
    return made


def loads(*seen):
    return [round(each.load) for each in forecaster(*seen).forecast([], 5)]


def test_two_periods_are_needed_and_one_without_arrivals_is_none():
    made = forecaster(600)
    assert not made.ready
    made.add(Period(60.0, 120.0, [Job(60.0, 0, 50, 5)]))
    assert not made.ready
    made.add(period(120.0, 36_000))
    assert made.ready


def test_the_requests_of_the_last_periods_come_again_at_the_mean_load_of_the_last_two():
    now = forecaster(300, 600, 600).forecast([], 5).now
    assert now.load == pytest.approx(600)
    assert (now.began, now.ended) == (
        180.0,
        180.0 + 30.0 + 4 * 60.0 + 30.0,
    )  # the first period at twice its load
    assert len(now.jobs) == 6 * 3
    assert all(a.arrived < b.arrived for a, b in zip(now.jobs, now.jobs[1:], strict=False))
    assert loads(300, 600, 900)[0] == 750


def test_where_fewer_periods_fit_the_newest_come_again():
    now = forecaster(300, 300, 900, 900).forecast([], 2).now
    assert (now.load, now.ended - now.began) == (pytest.approx(900), pytest.approx(120.0))
    assert {job.prompt for job in now.jobs} == {900 * 60 // 3 - 10}


def test_what_is_left_is_open_at_the_beginning_and_does_not_come_again():
    left = [Job(7.0, 0, 300, 4)]
    for each in forecaster(600, 600).forecast(left, 5):
        assert each.jobs[0] == Job(120.0, 0, 300, 4)
        assert sum(job.arrived == 120.0 for job in each.jobs) == 1


def test_a_steady_load_may_rise_a_little_and_all_loads_last_equally_long():
    made = forecaster(1200, 1200, 1200).forecast([], 5)
    assert [each.load for each in made] == pytest.approx([1200, 1560], rel=0.01)
    assert all(each.ended - each.began == pytest.approx(300.0, abs=60.0) for each in made)


def test_a_load_that_has_jumped_may_jump_back_as_high_as_it_was():
    assert loads(3000, 3000, 1000, 1000)[1] == pytest.approx(3000, rel=0.01)


def test_a_load_that_fell_slowly_is_expected_to_rise_slowly():
    later = loads(3000, 3000, 2500, 2500, 2000, 2000, 1600, 1600, 1200, 1200)[1]
    assert later == pytest.approx(1200 * 2200 / 1600, rel=0.1)


def test_loads_are_forgotten_after_an_hour():
    assert loads(3000, 3000, *[1000] * 60)[1] == pytest.approx(1300, rel=0.01)
