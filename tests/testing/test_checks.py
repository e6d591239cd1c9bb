"""Each check fails for a policy that breaks its rule, and says which."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from headrace.core.memory.eviction import LeastRecentlyUsed
from headrace.core.queueing.order import FirstComeFirstServed
from headrace.core.scheduler.admission import Continuous
from headrace.core.scheduler.victims import LastRanked
from headrace.lab.workload.dataset import DATASETS, Dataset
from headrace.lab.workload.work import Work
from headrace.response_cache.stores.memory import MemoryStore
from headrace.testing import (
    StoreTraits,
    check_admission,
    check_eviction,
    check_order,
    check_store,
    check_victims,
    check_workload,
    checks,
)


class SameRank:
    def rank(self, request, number):
        return (1.0,)


class LatestFirst:
    def rank(self, request, number):
        return (-number, number)


class RandomOrder:
    def rank(self, request, number):
        return (random.random(), number)


class AdmitsTooMany(Continuous):
    def admit(self, queue, now):
        return queue.waiting + 1


class NeverReady(Continuous):
    def admit(self, queue, now):
        return 0


class FirstCandidate:
    def choose(self, candidates, now):
        return candidates[0]


class Stranger:
    def choose(self, candidates, now):
        return None


class NotANumber:
    def priority(self, block):
        return math.nan


class RandomPriority:
    def priority(self, block):
        return random.random()


def test_good_policies_pass():
    check_order(FirstComeFirstServed)
    check_admission(Continuous)
    check_victims(LastRanked)
    check_eviction(LeastRecentlyUsed)


@pytest.mark.parametrize(
    ("check", "policy", "error", "reported"),
    [
        (check_order, SameRank, ValueError, r"\(1.0,\) is not a tuple of numbers that ends in 0"),
        (check_order, LatestFirst, AssertionError, "ranks of equal requests, by arrival"),
        (check_order, RandomOrder, AssertionError, "gives the same requests other ranks"),
        (check_admission, AdmitsTooMany, AssertionError, "2 admitted of 1 waiting requests"),
        (check_admission, NeverReady, AssertionError, "no request is admitted at 0.0"),
        (check_victims, FirstCandidate, AssertionError, "the first of several candidates must make progress"),
        (check_victims, Stranger, AssertionError, "None is not one of the candidates"),
        (check_eviction, NotANumber, AssertionError, "the priority is NaN"),
        (check_eviction, RandomPriority, AssertionError, "another priority in a second call"),
    ],
)
def test_bad_policies_fail(check, policy, error, reported):
    with pytest.raises(error, match=reported):
        check(policy)


class Fixed:
    def draw(self, dataset: Dataset) -> list[Work]:
        return [Work(f"w{i}", "Hello", 4) for i in range(dataset.count)]


class TooFew(Fixed):
    def draw(self, dataset):
        return super().draw(dataset)[1:]


class Twice(Fixed):
    def draw(self, dataset):
        return [replace(each, id="w") for each in super().draw(dataset)]


class Other(Fixed):
    def draw(self, dataset):
        return [replace(each, max_tokens=random.randrange(1, 10**9)) for each in super().draw(dataset)]


class BuiltIn:
    def __init__(self, name: str) -> None:
        self.name = name

    def draw(self, dataset: Dataset) -> tuple[Work, ...]:
        return replace(dataset, name=self.name).draw()


def test_a_good_workload_passes():
    check_workload(Fixed)


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("jsonl", "trace")])
def test_built_in_workloads_pass(name):
    check_workload(lambda: BuiltIn(name))


@pytest.mark.parametrize(
    ("kind", "reported"),
    [(TooFew, "19 requests drawn, expected 20"), (Twice, "the same id"), (Other, "draws other requests")],
)
def test_bad_workloads_fail(kind, reported):
    with pytest.raises(AssertionError, match=reported):
        check_workload(kind)


ALONE = StoreTraits(shared=False)


class Forgets(MemoryStore):
    async def put(self, key, value, ttl, tags):
        pass


class KeepsForEver(MemoryStore):
    async def put(self, key, value, ttl, tags):
        await super().put(key, value, 60.0, tags)


class ClearsAll(MemoryStore):
    async def clear(self, tag):
        await super().clear("*")


class Miscounts(MemoryStore):
    def facts(self):
        return super().facts()._replace(nbytes=0)


def maker(kind):
    store = kind(8 << 20)
    return lambda: store


def test_a_good_store_passes():
    check_store(maker(MemoryStore), ALONE)


@pytest.mark.parametrize(
    ("kind", "error", "reported"),
    [
        (Forgets, AssertionError, "a value of 3 bytes is not returned"),
        (ClearsAll, AssertionError, "wrong values after clear"),
        (KeepsForEver, TimeoutError, None),
        (Miscounts, AssertionError, "bytes are not counted"),
    ],
)
def test_bad_stores_fail(kind, error, reported, monkeypatch):
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(error, match=reported):
        check_store(maker(kind), ALONE)


def test_a_store_without_versions_is_not_shared():
    with pytest.raises((AssertionError, KeyError)):
        check_store(maker(MemoryStore), StoreTraits(shared=True))
