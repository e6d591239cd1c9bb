from __future__ import annotations

from headrace.core.scheduler.routing import LeastLoaded, PrefixAffinity, ReplicaLoad, RoundRobin
from tests.doubles.scenes import request

IDLE = [ReplicaLoad(0, 0)] * 3


def test_round_robin_goes_round():
    policy = RoundRobin()
    assert [policy.choose(request("a"), IDLE) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_least_loaded_has_the_fewest_tokens_then_the_fewest_requests():
    policy = LeastLoaded()
    assert policy.choose(request("a"), [ReplicaLoad(1, 50), ReplicaLoad(9, 40), ReplicaLoad(2, 60)]) == 1
    assert policy.choose(request("a"), [ReplicaLoad(3, 40), ReplicaLoad(2, 40), ReplicaLoad(2, 40)]) == 1


def prompt(*parts: tuple[int, int]) -> tuple[int, ...]:
    return tuple(token for token, count in parts for _ in range(count))


def test_prompts_that_begin_alike_go_where_the_first_went():
    policy = PrefixAffinity(chunk_tokens=4)
    loads = [ReplicaLoad(1, 100), ReplicaLoad(0, 0), ReplicaLoad(0, 0)]
    assert policy.choose(request("a", prompt((1, 8), (2, 4))), loads) == 1
    busier = [ReplicaLoad(0, 0), ReplicaLoad(1, 12), ReplicaLoad(0, 0)]
    assert policy.choose(request("b", prompt((1, 8), (3, 9))), busier) == 1, "eight tokens are shared"
    assert policy.choose(request("c", prompt((1, 3), (9, 9))), busier) == 0, "less than a stretch is not"
    assert policy.choose(request("d", prompt((1, 8)), salt="other"), busier) == 0, "nor is another salt's"


def test_affinity_yields_to_imbalance():
    policy = PrefixAffinity(chunk_tokens=4, slack_tokens=100, imbalance=1.5)
    shared = prompt((1, 8))
    assert policy.choose(request("a", shared), IDLE) == 0
    assert (
        policy.choose(request("b", shared), [ReplicaLoad(9, 100), ReplicaLoad(0, 0), ReplicaLoad(0, 0)]) == 0
    )
    assert (
        policy.choose(request("c", shared), [ReplicaLoad(9, 101), ReplicaLoad(0, 0), ReplicaLoad(0, 0)]) == 1
    )
    assert (
        policy.choose(request("d", shared), [ReplicaLoad(0, 0), ReplicaLoad(9, 90), ReplicaLoad(0, 0)]) == 1
    ), "moved"


def test_affinity_forgets_the_oldest_prefixes():
    policy = PrefixAffinity(chunk_tokens=4, max_entries=2)
    assert policy.choose(request("a", prompt((1, 4))), [ReplicaLoad(0, 9), ReplicaLoad(0, 0)]) == 1
    for token in (2, 3):
        policy.choose(request("x", prompt((token, 4))), [ReplicaLoad(0, 0), ReplicaLoad(0, 9)])
    assert policy.choose(request("b", prompt((1, 4))), [ReplicaLoad(0, 0), ReplicaLoad(0, 9)]) == 0
