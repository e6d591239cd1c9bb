"""When what is searched for garbage: what is recent often, everything rarely, neither while somebody waits."""

import gc
import weakref

import pytest

from headrace.api.runtime.run import (
    MANY,
    PATIENCE,
    QUIET_SECONDS,
    RECENT_SECONDS,
    REST_SECONDS,
    GarbageCollection,
)


class Circle:
    """Garbage that counting does not free."""

    def __init__(self) -> None:
        self.itself: Circle | None = self


class House:
    """A clock that stands still, somebody who may wait, and calls that may come."""

    def __init__(self) -> None:
        self.now, self.busy, self.calls = 0.0, False, 0
        self.created = 0
        self.garbage = GarbageCollection(
            lambda: self.busy, lambda: self.calls, lambda: self.now, lambda: self.created
        )
        self.garbage.take_over()

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.garbage.tick()


@pytest.fixture(autouse=True, scope="module")
def as_before():
    """What other tests have left is searched once, and frozen until the last test here has ended."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def threshold_as_before():
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)


def put_aside(house: House) -> "weakref.ref[Circle]":
    """A circle that was alive when what is recent was searched, and is garbage since."""
    circle = Circle()
    house.after(RECENT_SECONDS)
    return weakref.ref(circle)


def test_recent_circles_are_found_when_there_is_no_answer() -> None:
    house = House()
    lost = weakref.ref(Circle())
    house.after(RECENT_SECONDS / 2)
    house.busy = True
    house.after(RECENT_SECONDS)
    assert lost() is not None
    house.busy = False
    house.after(0.01)
    assert lost() is None


def test_collection_runs_eventually_under_constant_load() -> None:
    house = House()
    house.busy = True
    lost = weakref.ref(Circle())
    house.after(PATIENCE * RECENT_SECONDS - 0.1)
    assert lost() is not None
    house.after(0.11)
    assert lost() is None


def test_a_full_collection_runs_after_an_idle_time() -> None:
    house = House()
    lost = put_aside(house)
    house.after(REST_SECONDS - RECENT_SECONDS - 0.1)
    assert lost() is not None, "it was put aside, and everything is not due yet"
    house.calls += 1
    house.after(0.1)
    assert lost() is not None, "somebody has called"
    house.after(QUIET_SECONDS - 0.1)
    assert lost() is not None, "and another may follow"
    house.after(0.1)
    assert lost() is None


def test_calls_without_a_pause_do_not_put_it_off_for_ever() -> None:
    house = House()
    lost = put_aside(house)
    while house.now < PATIENCE * REST_SECONDS - 1:
        house.calls += 1
        house.after(1.0)
    assert lost() is not None
    house.calls += 1
    house.after(1.0)
    assert lost() is None


def test_a_long_search_of_everything_is_followed_by_a_long_rest(monkeypatch) -> None:
    house = House()
    searches = []

    def collect(generation: int) -> None:
        if generation == 2:
            house.now += 0.5
            searches.append(house.now)

    monkeypatch.setattr(gc, "collect", collect)
    house.after(REST_SECONDS)
    assert len(searches) == 1
    house.after(499)
    assert len(searches) == 1
    house.after(1)
    assert len(searches) == 2


def test_python_itself_searches_only_what_is_youngest() -> None:
    House()
    assert min(gc.get_threshold()[1:]) > 10**6
    assert gc.isenabled()


def test_objects_of_the_start_up_are_never_searched_again() -> None:
    early = [[number] for number in range(1000)]
    house = House()
    late = [[number] for number in range(10)]
    frozen = gc.get_freeze_count()
    house.after(RECENT_SECONDS)
    house.after(REST_SECONDS)
    assert gc.get_freeze_count() == frozen
    searched = {id(each) for each in gc.get_objects()}
    assert searched.isdisjoint(map(id, early))
    assert searched.issuperset(map(id, late))


def test_young_objects_are_counted_since_the_last_search_of_recent_ones() -> None:
    house = House()
    house.garbage = GarbageCollection(lambda: True, lambda: 0, lambda: house.now)
    kept = []
    lost = weakref.ref(Circle())
    for _ in range(MANY + 1):
        kept += [[] for _ in range(gc.get_threshold()[0] + 1)]
    house.after(0.01)
    assert lost() is None
    assert gc.get_count()[1] < MANY
    assert kept


def test_many_new_objects_are_searched_though_somebody_waits() -> None:
    house = House()
    house.busy = True
    lost = weakref.ref(Circle())
    house.created = MANY - 1
    house.after(0.01)
    assert lost() is not None
    house.created = MANY
    house.after(0.01)
    assert lost() is None
