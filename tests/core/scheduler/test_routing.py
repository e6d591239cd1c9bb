from __future__ import annotations

from headrace.core.scheduler.routing import LeastLoaded, PrefixAffinity, RoundRobin, Standing
from tests.doubles.scenes import request

IDLE = [Standing(0, 0)] * 3


def test_round_robin_goes_round():
    policy = RoundRobin()
    assert [policy.choose(request("a"), IDLE) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_least_loaded_has_the_fewest_tokens_then_the_fewest_requests():
    policy = LeastLoaded()
    assert policy.choose(request("a"), [Standing(1, 50), Standing(9, 40), Standing(2, 60)]) == 1
    assert policy.choose(request("a"), [Standing(3, 40), Standing(2, 40), Standing(2, 40)]) == 1


def prompt(*parts: tuple[int, int]) -> tuple[int, ...]:
    return tuple(token for token, count in parts for _ in range(count))


def test_prompts_that_begin_alike_go_where_the_first_went():
    policy = PrefixAffinity(stretch_tokens=4)
    loads = [Standing(1, 100), Standing(0, 0), Standing(0, 0)]
    assert policy.choose(request("a", prompt((1, 8), (2, 4))), loads) == 1
    busier = [Standing(0, 0), Standing(1, 12), Standing(0, 0)]
    assert policy.choose(request("b", prompt((1, 8), (3, 9))), busier) == 1, "eight tokens are shared"
    assert policy.choose(request("c", prompt((1, 3), (9, 9))), busier) == 0, "less than a stretch is not"
    assert policy.choose(request("d", prompt((1, 8)), salt="other"), busier) == 0, "nor is another salt's"


def test_affinity_yields_to_imbalance():
    policy = PrefixAffinity(stretch_tokens=4, slack_tokens=100, imbalance=1.5)
    shared = prompt((1, 8))
    assert policy.choose(request("a", shared), IDLE) == 0
    assert policy.choose(request("b", shared), [Standing(9, 100), Standing(0, 0), Standing(0, 0)]) == 0
    assert policy.choose(request("c", shared), [Standing(9, 101), Standing(0, 0), Standing(0, 0)]) == 1
    assert policy.choose(request("d", shared), [Standing(0, 0), Standing(9, 90), Standing(0, 0)]) == 1, (
        "moved"
    )


def test_affinity_forgets_the_oldest_prefixes():
    policy = PrefixAffinity(stretch_tokens=4, remembered=2)
    assert policy.choose(request("a", prompt((1, 4))), [Standing(0, 9), Standing(0, 0)]) == 1
    for token in (2, 3):
        policy.choose(request("x", prompt((token, 4))), [Standing(0, 0), Standing(0, 9)])
    assert policy.choose(request("b", prompt((1, 4))), [Standing(0, 0), Standing(0, 9)]) == 0
