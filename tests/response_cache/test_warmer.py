import asyncio
import gc
import weakref

import pytest

from headrace.core.events import Admitted, Arrived
from headrace.response_cache.history import History, Recorded
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.warming import DAY, IdleDetector
from headrace.response_cache.warmer import (
    ID_PREFIX,
    PREFIX_SECONDS,
    REFILL_SECONDS,
    BackgroundRequests,
    NotCacheable,
    Outcome,
    Warmer,
)
from tests.doubles.cached_services import house, truth
from tests.doubles.services import read_all
from tests.response_cache.test_history import on_a_loop
from tests.response_cache.test_partial import WHOLE, partial


@on_a_loop
async def test_what_is_computed_ahead_is_there_when_it_is_asked_for():
    async with house() as h:
        ahead = BackgroundRequests(h.lookup)
        answer = await ahead.open([h.question(), h.question(6)])
        reported = await read_all(answer)
        ahead.close(answer)
        assert answer.note == "computed"
        assert [event.output_tokens for _, event in sorted(reported)] == [5, 6], "it ends and tells no tokens"
        await h.settle()
        before = h.runner.computed_tokens
        assert await h.answer() == ("hit; layer=exact; age=0", truth())
        assert h.runner.computed_tokens == before
        assert all(event.request_id.startswith(ID_PREFIX) for event in h.events(Admitted))


@on_a_loop
async def test_what_is_kept_is_not_computed_again():
    async with house() as h:
        await h.answer()
        before = h.runner.computed_tokens
        answer = await BackgroundRequests(h.lookup).open([h.question()])
        await read_all(answer)
        assert answer.note == "kept"
        assert h.runner.computed_tokens == before


@on_a_loop
async def test_what_was_computed_leaves_nothing_that_has_to_be_searched_for():
    async with house() as h:
        ahead = BackgroundRequests(h.lookup)
        gc.collect()
        gc.disable()
        try:
            answer = await ahead.open([h.question()])
            computations = [weakref.ref(computation) for computation in answer.computations]
            await read_all(answer)
            ahead.close(answer)
            await h.settle()
            del answer
            assert [computation() for computation in computations] == [None]
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "directives", [CacheDirectives(no_store=True), CacheDirectives(samples=4)], ids=["no_store", "pool"]
)
@on_a_loop
async def test_what_could_not_be_kept_is_not_computed(directives):
    async with house() as h:
        with pytest.raises(NotCacheable):
            await BackgroundRequests(h.lookup).open([h.question(control=directives, temperature=1.0)])
        assert not h.service.open_requests()


@on_a_loop
async def test_interrupted_it_leaves_what_it_has_for_the_next_time():
    async with house(partial=partial(), **WHOLE) as h:
        ahead = BackgroundRequests(h.lookup)
        answer = await ahead.open([h.question(400)])
        reading = asyncio.create_task(answer.read())
        while h.runner.computed_tokens < 60:  # of which the reader has some only
            await asyncio.sleep(0.001)
        reading.cancel()
        ahead.close(answer)
        while h.service.open_requests():
            await asyncio.sleep(0.001)
        before = h.runner.computed_tokens
        again = await ahead.open([h.question(400)])
        await read_all(again)
        assert h.runner.computed_tokens - before < 400 - 20
        await h.settle()
        assert (await h.answer(400))[1] == truth(400)


@on_a_loop
async def test_a_client_that_joins_background_work_does_not_wait_for_idle_time():
    async with house(**WHOLE) as h:
        ahead = BackgroundRequests(h.lookup)
        warm = await ahead.open([h.question(400)])
        note, tokens = await h.answer(400)
        assert note in ("miss", "hit; layer=exact; age=0")
        assert tokens == truth(400)
        await read_all(warm)
        ahead.close(warm)
        assert not h.service.open_requests()


WALL = 20_000 * DAY


def question(name):
    return Recorded("/v1/completions", None, None, name.encode())


class Desk:
    """Computes a question when it is told to; counts the interrupted."""

    def __init__(self):
        self.begun = []
        self.done = []
        self.interrupted = []
        self.slow = False
        self.gate = asyncio.Event()
        self.outcome = Outcome.COMPUTED

    async def compute(self, recorded, begun):
        name = recorded.body.decode()
        self.begun.append(name)
        if not self.slow:
            begun()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.interrupted.append(name)
            raise
        self.done.append(name)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Scene:
    """A warmer whose ticks a test makes."""

    def __init__(self, desk, *, below_rate=0.2, seconds_per_hour=1000.0, batch=2, history=None):
        self.now = 0.0
        self.desk = desk
        self.busy = False
        self.warmer = Warmer(
            desk.compute,
            lambda: self.busy,
            IdleDetector(below_rate, 5.0, 0.0),
            lambda: self.now,
            lambda: WALL + self.now,
            batch=batch,
            seconds_per_hour=seconds_per_hour,
            horizon_seconds=3600.0,
            history=history,
        )

    async def tick(self, seconds=1.0):
        self.now += seconds
        await self.warmer._tick()
        for _ in range(5):
            await asyncio.sleep(0)

    def arrivals(self, count, service_class="default"):
        for number in range(count):
            self.warmer.fold(
                Arrived(f"{service_class}{number}", 1, "t", 0, service_class=service_class), self.now
            )


@on_a_loop
async def test_nothing_runs_until_it_has_been_quiet_for_a_while():
    scene = Scene(Desk())
    scene.warmer.add([question("a")])
    await scene.tick(4.9)
    assert not scene.desk.begun
    await scene.tick(0.1)
    assert scene.desk.begun == ["a"]


@on_a_loop
async def test_a_batch_runs_at_once_and_the_next_when_there_is_room():
    scene = Scene(Desk())
    scene.warmer.add(question(name) for name in "abc")
    await scene.tick(6.0)
    assert scene.desk.begun == ["a", "b"]
    scene.desk.gate.set()
    await scene.tick()
    await scene.tick()
    state = scene.warmer.state()
    assert (state.waiting, state.running, state.computed) == (0, 0, 3)


@on_a_loop
async def test_arrivals_interrupt_it_and_it_goes_on_afterwards():
    scene = Scene(Desk())
    scene.warmer.add(question(name) for name in "abc")
    await scene.tick(6.0)
    scene.arrivals(20)
    await scene.tick()
    assert sorted(scene.desk.interrupted) == ["a", "b"]
    assert scene.warmer.state().waiting == 3
    scene.desk.gate.set()
    await scene.tick(100.0)  # the rate has fallen, but it must stay low for a while
    for _ in range(3):
        await scene.tick(6.0)
    assert scene.desk.done == ["a", "b", "c"]


@on_a_loop
async def test_its_own_requests_are_no_arrivals():
    scene = Scene(Desk())
    await scene.tick(6.0)
    scene.arrivals(50, "background")
    scene.warmer.add([question("a")])
    await scene.tick()
    assert scene.warmer.state().quiet
    assert scene.desk.begun == ["a"]


@on_a_loop
async def test_no_warming_starts_while_a_request_is_open_even_at_low_traffic():
    scene = Scene(Desk(), below_rate=100.0)
    scene.warmer.add([question("a")])
    scene.busy = True
    await scene.tick(6.0)
    assert scene.warmer.state().quiet
    assert not scene.desk.begun
    scene.busy = False
    await scene.tick()
    assert scene.desk.begun == ["a"]


@on_a_loop
async def test_an_arrival_is_handled_before_the_next_request_of_a_warming_batch():
    scene = Scene(Desk(), below_rate=100.0, batch=8)
    scene.warmer.add(question(name) for name in "abcdefgh")
    asyncio.get_running_loop().call_soon(setattr, scene, "busy", True)
    await scene.tick(6.0)
    assert scene.desk.begun == ["a"]


@on_a_loop
async def test_the_next_is_begun_when_the_one_before_has_been_read():
    scene = Scene(Desk(), batch=8)
    scene.warmer.add(question(name) for name in "ab")
    scene.desk.slow = True
    tick = asyncio.create_task(scene.tick(6.0))
    await asyncio.sleep(0.01)
    assert scene.desk.begun == ["a"]
    scene.desk.gate.set()  # it ends before it says that it has been read
    await tick
    assert scene.desk.done == ["a", "b"]


@on_a_loop
async def test_the_allowance_is_for_an_hour():
    scene = Scene(Desk(), seconds_per_hour=10.0)
    scene.warmer.add(question(name) for name in "abcdef")
    await scene.tick(6.0)
    await scene.tick(11.0)
    assert scene.warmer.state().left_seconds == 0
    assert sorted(scene.desk.interrupted) == ["a", "b"]
    await scene.tick(100.0)
    assert scene.warmer.state().running == 0
    await scene.tick(3600.0)
    await scene.tick()
    assert scene.warmer.state().running == 2


@on_a_loop
async def test_one_that_fails_is_counted_and_the_others_go_on():
    scene = Scene(Desk())
    scene.desk.gate.set()
    scene.desk.outcome = RuntimeError("broken")
    scene.warmer.add([question("a")])
    await scene.tick(6.0)
    await scene.tick()
    scene.desk.outcome = Outcome.KEPT
    scene.warmer.add([question("b")])
    await scene.tick()
    await scene.tick()
    state = scene.warmer.state()
    assert (state.refused, state.kept, state.computed) == (1, 1, 0)


async def recorded(tmp_path, names, answered=True):
    history = History(tmp_path / "history.db")
    for times, name in enumerate(names, start=1):
        for _ in range(times):
            history.asked(name.encode(), "t", WALL - 60, question(name))
        if answered:
            history.computed(name.encode(), 1.0, 10, WALL + DAY)
    await history.flush()
    history.engine = b"new"
    return history


@on_a_loop
async def test_the_history_is_worked_through_the_most_wanted_first(tmp_path):
    history = await recorded(tmp_path, "abc")
    scene = Scene(Desk(), history=history)
    scene.desk.gate.set()
    assert not scene.warmer.settled
    for _ in range(5):
        await scene.tick(6.0)
    assert scene.desk.done == ["c", "b", "a"]
    assert scene.warmer.settled
    await scene.tick(REFILL_SECONDS)
    assert len(scene.desk.done) == 3, "what has been dealt with is not wanted again"
    await history.stop()


@on_a_loop
async def test_what_the_history_holds_beyond_the_allowance_does_not_keep_it_from_being_settled(tmp_path):
    history = await recorded(tmp_path, "abc")
    scene = Scene(Desk(), history=history, seconds_per_hour=2.0)
    await scene.tick(6.0)
    assert scene.warmer.state().running == 2
    assert not scene.warmer.settled
    await scene.tick(3.0)
    assert scene.warmer.settled
    await history.stop()


@on_a_loop
async def test_a_prefix_is_asked_for_now_and_again_and_after_a_restart(tmp_path):
    history = await recorded(tmp_path, "")
    scene = Scene(Desk(), history=history)
    scene.desk.gate.set()
    for _ in range(2):
        await scene.warmer.keep_warm("t", question("system"))
    await scene.tick(6.0)
    await scene.tick()
    assert scene.desk.done == ["system"]
    await scene.tick(PREFIX_SECONDS)
    await scene.tick()
    assert scene.desk.done == ["system", "system"]
    assert await history.prefixes() == [question("system")]
    again = Scene(Desk(), history=history)
    again.warmer.start()
    async with asyncio.timeout(60.0):
        while again.warmer.state().prefixes != 1:
            await asyncio.sleep(0.01)
    await again.warmer.stop()
    await history.stop()


@on_a_loop
async def test_of_too_many_prefixes_those_registered_last_stay(tmp_path, monkeypatch):
    for module in ("warmer", "history"):
        monkeypatch.setattr(f"headrace.response_cache.{module}.MOST_PREFIXES", 2)
    monkeypatch.setattr("headrace.response_cache.warmer.MAX_JOBS", 3)
    history = await recorded(tmp_path, "")
    scene = Scene(Desk(), history=history)
    for name in "abcd":
        await scene.warmer.keep_warm("t", question(name))
    assert (scene.warmer.state().prefixes, scene.warmer.state().waiting) == (2, 3)
    assert await history.prefixes() == [question("c"), question("d")]
    scene.desk.gate.set()
    await scene.tick(6.0)
    await scene.tick()
    assert sorted(scene.desk.done) == ["a", "b", "c"]
    await scene.tick(PREFIX_SECONDS)
    await scene.tick()
    assert sorted(scene.desk.done[3:]) == ["c", "d"]
    await history.stop()


@on_a_loop
async def test_stopping_leaves_nothing_running():
    scene = Scene(Desk())
    scene.warmer.add([question("a")])
    scene.now = 6.0
    scene.warmer.start()
    while not scene.desk.begun:
        await asyncio.sleep(0.01)
    await scene.warmer.stop()
    assert scene.desk.interrupted == ["a"]


@on_a_loop
async def test_a_prefix_that_waits_is_not_queued_again():
    scene = Scene(Desk(), batch=1, seconds_per_hour=3600.0)
    await scene.tick(6)
    for name in "abc":
        await scene.warmer.keep_warm("t", question(name))
    for _ in range(5):
        await scene.tick(PREFIX_SECONDS + 1)
    state = scene.warmer.state()
    assert (state.running, state.waiting) == (1, 2)
