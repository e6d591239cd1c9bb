"""A request whose adapter is not on the device waits, but no stream of others starves it."""

from __future__ import annotations

from collections.abc import Callable, Set

from headrace.core.adapters import ADAPTER_PREFIX, AdapterLost
from headrace.core.events import Event, Finished, Skipped, SkipReason
from headrace.core.knobs import Knobs
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler.holds import Every, NoHolds, UntilPlaced
from headrace.testing.engines import hashing_engine

LOADING, READY, USED = range(3)


class Places:
    """Two places; an adapter comes at the second look, and stays until a request has used it."""

    def __init__(self) -> None:
        self.placed: dict[str, int] = {}
        self.most_used = 0

    def hold(self, adapter: str, used: Callable[[], Set[str]]) -> SkipReason | None:
        now = used() - {""}
        self.most_used = max(self.most_used, len(now))
        self.placed |= dict.fromkeys(now, USED)
        if adapter == "gone":
            raise AdapterLost("it has gone")
        if adapter in self.placed:
            arrived = self.placed[adapter] != LOADING
            self.placed[adapter] = max(self.placed[adapter], READY)
            return None if arrived else SkipReason.ADAPTER_LOADING
        if len(self.placed) == 2:
            free = [each for each, state in self.placed.items() if state == USED and each not in now]
            if not free:
                full = self.placed.keys() <= now
                return SkipReason.NO_ADAPTER_PLACE if full else SkipReason.ADAPTER_LOADING
            del self.placed[free[0]]
        self.placed[adapter] = LOADING
        return SkipReason.ADAPTER_LOADING


def engine_of(places: Places, **given: object):
    engine, _ = hashing_engine(
        holds=Every(NoHolds(), UntilPlaced(places, lambda: engine.scheduler.adapters)),
        **given,  # type: ignore[arg-type]
    )
    return engine


def request(name: str, adapter: str, tokens: int = 4, service_class: str = "default") -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, (1, 2, 3), params, adapter=adapter, service_class=service_class)


def run(engine, steps: int, now: float = 0.0) -> list[Event]:
    events: list[Event] = []
    for step in range(steps):
        events += engine.step(now + 0.01 * step)
    return events


def finished(events: list[Event]) -> dict[str, Finished]:
    return {event.request_id: event for event in events if isinstance(event, Finished)}


def test_it_waits_until_its_adapter_is_there() -> None:
    engine = engine_of(Places())
    engine.submit(request("a", "one"), 0.0)
    events = run(engine, 12)
    assert Skipped("a", SkipReason.ADAPTER_LOADING) in events
    assert finished(events)["a"].reason is FinishReason.LENGTH
    engine.check_consistency()


def test_many_adapters_go_through_few_places() -> None:
    places = Places()
    engine = engine_of(places)
    for number in range(30):
        engine.submit(request(f"r{number}", f"adapter{number % 7}" if number % 5 else ""), 0.0)
    events = run(engine, 400)
    assert len(finished(events)) == 30
    assert {each.reason for each in finished(events).values()} == {FinishReason.LENGTH}
    assert places.most_used == 2
    engine.check_consistency()


def test_a_stream_of_other_adapters_does_not_starve_it() -> None:
    engine = engine_of(Places(), knobs=Knobs(max_skips=4))
    events: list[Event] = []
    for step in range(200):
        for adapter in ("one", "two"):  # both places are always in use, unless the third request is let in
            engine.submit(request(f"{adapter}{step}", adapter, tokens=6), 0.01 * step)
        if step == 5:
            engine.submit(request("third", "three"), 0.01 * step)
        events += engine.step(0.01 * step)
        if "third" in finished(events):
            break
    assert Skipped("third", SkipReason.NO_ADAPTER_PLACE) in events
    assert finished(events)["third"].reason is FinishReason.LENGTH


def test_an_adapter_that_is_lost_ends_only_its_request() -> None:
    engine = engine_of(Places())
    engine.submit(request("a", "gone"), 0.0)
    engine.submit(request("b", "one"), 0.0)
    ended = finished(run(engine, 12))
    assert (ended["a"].reason, ended["a"].message) == (FinishReason.FAILED, f"{ADAPTER_PREFIX}it has gone")
    assert ended["b"].reason is FinishReason.LENGTH
    engine.check_consistency()
