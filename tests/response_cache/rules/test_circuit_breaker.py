from headrace.response_cache.rules.circuit_breaker import (
    FAILURES,
    MAX_OPEN_SECONDS,
    OPEN_SECONDS,
    CircuitBreaker,
)


def broken(now=0.0):
    breaker = CircuitBreaker()
    for _ in range(FAILURES):
        assert breaker.permits(now)
        breaker.failed(now)
    return breaker


def test_it_opens_after_failures_in_a_row_only():
    breaker = CircuitBreaker()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            breaker.failed(0.0)
        breaker.succeeded()
        assert breaker.permits(0.0)
    assert not broken().permits(0.0)


def test_one_tries_when_the_rest_is_over_and_success_lets_all_in():
    breaker = broken()
    assert not breaker.permits(OPEN_SECONDS - 0.01)
    assert breaker.permits(OPEN_SECONDS)
    assert not breaker.permits(OPEN_SECONDS)
    breaker.succeeded()
    assert breaker.permits(OPEN_SECONDS)


def test_a_trial_without_a_result_does_not_block_it_for_ever():
    breaker = broken()
    assert breaker.permits(OPEN_SECONDS)
    assert breaker.permits(2 * OPEN_SECONDS)


def test_rests_grow_to_a_bound():
    breaker, now, rests = broken(), 0.0, []
    for _ in range(12):
        waited = 0.0
        while not breaker.permits(now):
            now += 0.5
            waited += 0.5
        breaker.failed(now)
        rests.append(waited)
    assert rests[0] == OPEN_SECONDS
    assert rests[1] == 2 * OPEN_SECONDS
    assert rests[-1] == MAX_OPEN_SECONDS
