"""When everything is searched for garbage: rarely, and not while somebody waits."""

import gc
import weakref

import pytest

from headrace.serve.server.garbage import PATIENCE, REST_SECONDS, Garbage


class Circle:
    """Garbage that counting does not free."""

    def __init__(self) -> None:
        self.itself = self


class House:
    """A clock that stands still and somebody who may wait."""

    def __init__(self) -> None:
        self.now, self.busy = 0.0, False
        self.garbage = Garbage(lambda: self.busy, lambda: self.now)

    def after(self, seconds: float) -> bool:
        self.now += seconds
        return self.garbage.tick()


@pytest.fixture(autouse=True)
def as_before():
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


def test_circles_are_found_in_a_quiet_moment_after_a_rest() -> None:
    house = House()
    house.garbage.take_over()
    lost = weakref.ref(Circle())
    assert not house.after(REST_SECONDS - 1)
    house.busy = True
    assert not house.after(2)
    house.busy = False
    assert lost() is not None
    assert house.after(0.1)
    assert lost() is None
    assert not house.after(REST_SECONDS - 1), "a rest begins with the end of a search"
    assert house.after(1)


def test_whoever_is_never_quiet_is_searched_in_the_end() -> None:
    house = House()
    house.garbage.take_over()
    house.busy = True
    assert not house.after(PATIENCE * REST_SECONDS - 1)
    assert house.after(1)


def test_a_long_search_is_followed_by_a_long_rest(monkeypatch) -> None:
    house = House()
    house.garbage.take_over()

    def collect() -> None:
        house.now += 0.5

    monkeypatch.setattr(gc, "collect", collect)
    assert house.after(REST_SECONDS)
    assert not house.after(499)
    assert house.after(1)


def test_python_itself_searches_only_what_is_young() -> None:
    House().garbage.take_over()
    assert gc.get_threshold()[2] > 10**6
    assert gc.isenabled()
