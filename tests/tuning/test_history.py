from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    EngineLost,
    Finished,
    LostPart,
    Stepped,
)
from headrace.core.request import FinishReason
from headrace.tuning.traffic import History, Job


def arrive(history, name, at, prompt=100, cached=0):
    history.fold(Arrived(name, prompt, "t", 0, at), at)
    history.fold(Admitted(name, AdmitReason.NEW, cached, prompt), at)


def emit(history, name, at, count):
    for _ in range(count):
        history.fold(Emitted(name, (1,)), at)


def end(history, name, at, reason=FinishReason.LENGTH):
    history.fold(Finished(name, reason, 100, 0, 0), at)


def test_a_period_has_the_requests_that_arrive_in_it_with_what_is_left_of_their_prompts():
    history = History()
    history.open(0.0)
    arrive(history, "a", 1.0, 100, cached=64)
    emit(history, "a", 2.0, 7)
    end(history, "a", 3.0)
    watched = history.close(10.0)
    assert watched.period.jobs == [Job(1.0, 36, 64, 7)]
    assert (watched.period.began, watched.period.ended) == (0.0, 10.0)
    assert watched.measured["open_seconds_per_token"] == 2.0 / 7


def test_a_request_that_was_open_before_has_only_what_was_left_of_it():
    history = History()
    arrive(history, "a", 1.0)
    emit(history, "a", 2.0, 5)
    arrive(history, "b", 3.0)
    history.open(4.0)
    emit(history, "a", 5.0, 3)
    end(history, "a", 5.0)
    emit(history, "b", 6.0, 2)
    end(history, "b", 6.0)
    assert history.close(10.0).period.jobs == [Job(4.0, 0, 105, 3), Job(4.0, 100, 0, 2, waited=1.0)]


def test_a_prompt_that_was_computed_in_part_before_has_only_the_rest():
    history = History()
    arrive(history, "a", 1.0, 100, cached=16)
    history.fold(Chunked("a", 16, 40, ChunkReason.BUDGET), 2.0)
    history.open(3.0)
    history.fold(Chunked("a", 56, 44, ChunkReason.REST), 4.0)
    emit(history, "a", 4.0, 2)
    end(history, "a", 5.0)
    assert history.close(6.0).period.jobs == [Job(3.0, 44, 56, 2, waited=2.0)]


def test_an_open_request_becomes_as_long_as_those_that_ended_and_longer_than_it_is():
    history = History()
    history.open(0.0)
    for name in "abc":
        arrive(history, name, 1.0)
    emit(history, "a", 2.0, 6)
    end(history, "a", 2.0)
    emit(history, "b", 2.0, 9)
    watched = history.close(3.0)
    assert [each.output for each in watched.period.jobs] == [6, 10, 6]
    assert watched.left == [Job(3.0, 0, 109, 1), Job(3.0, 100, 0, 6, waited=2.0)]


def test_what_is_left_of_a_prompt_is_what_was_not_computed_by_the_end_of_the_period():
    history = History()
    history.open(0.0)
    arrive(history, "a", 1.0)
    emit(history, "a", 2.0, 5)
    end(history, "a", 2.0)
    arrive(history, "b", 3.0, 100, cached=16)
    history.fold(Chunked("b", 16, 40, ChunkReason.BUDGET), 4.0)
    assert history.close(5.0).left == [Job(5.0, 44, 56, 5, waited=2.0)]


def test_requests_that_generated_nothing_are_left_out_and_an_empty_period_is_none():
    history = History()
    history.open(0.0)
    arrive(history, "a", 1.0)
    end(history, "a", 2.0, FinishReason.REJECTED)
    assert history.close(3.0) is None
    assert history.close(4.0) is None, "no period is open"
    history.open(5.0)
    arrive(history, "b", 6.0)
    emit(history, "b", 7.0, 2)
    end(history, "b", 7.0)
    arrive(history, "c", 8.0)
    end(history, "c", 8.0, FinishReason.CANCELLED)
    assert [each.arrived for each in history.close(9.0).period.jobs] == [6.0]


def lose(history, at, part=LostPart.PROCESS):
    history.fold(EngineLost(part, "killed", 1, 0), at)


def step(history, at):
    history.fold(Stepped(0, 1, 0, 1, 1, 0, 1, 8, 4, 1), at)


def test_a_period_in_which_the_engine_was_lost_or_still_loads_is_no_measurement_of_its_settings():
    history = History()
    for number in range(4):
        history.open(10.0 * number)
        arrive(history, f"r{number}", 10.0 * number + 1)
        if number == 1:
            lose(history, 15.0)
        if number == 2:  # the next process has begun to compute in this period
            step(history, 27.0)
        emit(history, f"r{number}", 10.0 * number + 8, 3)
        end(history, f"r{number}", 10.0 * number + 8)
        watched = history.close(10.0 * number + 10)
        assert (watched is None) == (number in (1, 2)), number


def test_a_period_after_a_loss_counts_once_the_engine_has_computed_a_step():
    history = History()
    history.open(0.0)
    arrive(history, "a", 1.0)
    lose(history, 2.0, LostPart.RANK)
    step(history, 3.0)
    assert history.close(10.0) is None
    history.open(10.0)
    emit(history, "a", 12.0, 3)
    end(history, "a", 12.0)
    assert history.close(20.0).period.jobs == [Job(10.0, 100, 0, 3, waited=9.0)]
