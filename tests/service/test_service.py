from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace

import pytest

from headrace.core.events import Emitted, Finished, Layer, LookedUp, Lookup, Stepped
from headrace.core.request import FinishReason, InvalidParameter, RejectReason
from headrace.core.tenancy.gate import Limits
from headrace.core.tenancy.tenants import BACKGROUND
from headrace.service import service as intake
from headrace.service import service as service_file
from headrace.service.answer import Answer
from headrace.service.service import Intake, Refused, Service
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.services import SOON, Book, Gate, end_of, read_all, request, serving, tokens_of

pytestmark = pytest.mark.anyio


async def test_each_turn_of_the_loop_runs_one_piece_of_all_calls(monkeypatch):
    monkeypatch.setattr(intake, "PIECE_SECONDS", -1.0)  # every part of the work is a piece of its own
    turns, done, most = Intake(), 0, 0

    async def call() -> None:
        nonlocal done
        pieces = turns.pieces()
        for _ in range(20):
            await pieces.turn()
            done += 1

    calls = [asyncio.create_task(call()) for _ in range(10)]
    while not all(each.done() for each in calls):
        before = done
        await asyncio.sleep(0)
        most = max(most, done - before)
    assert done == 200
    assert most <= 2  # not ten: another task waits for two parts at most


async def test_calls_take_turns(monkeypatch):
    monkeypatch.setattr(intake, "PIECE_SECONDS", -1.0)
    turns, order = Intake(), list[int]()

    async def call(number: int) -> None:
        pieces = turns.pieces()
        for _ in range(3):
            await pieces.turn()
            order.append(number)

    await asyncio.gather(*(call(number) for number in range(3)))
    assert sorted(order[:3]) == sorted(order[3:6]) == sorted(order[6:]) == [0, 1, 2]


async def test_a_small_call_does_not_wait():
    pieces = Intake().pieces()
    pieces._ends = float("inf")
    waiting = pieces.turn()
    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("it yielded")


async def test_a_call_that_is_cancelled_leaves_the_lock_to_others(monkeypatch):
    monkeypatch.setattr(intake, "PIECE_SECONDS", -1.0)
    turns = Intake()
    first = asyncio.create_task(turns.pieces().turn())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(turns.pieces().turn(), 5)


def test_each_sequence_of_a_call_is_reported_under_its_own_index():
    async def run():
        async with serving() as service:
            reported = await read_all(service.open([request("a", seed=1), request("b", seed=2)]))
            for index, seed in enumerate((1, 2)):
                assert tokens_of(reported, index) == expected_tokens((1, 2, 3), seed, 5, frozenset())
                assert end_of(reported, index) is FinishReason.LENGTH
            assert service.open_requests() == 0

    asyncio.run(run())


@pytest.fixture
def rests(monkeypatch):
    """The rests that the engine's thread has taken for first tokens, each as long as it needs."""
    taken = []

    class Rest(threading.Event):
        def wait(self, timeout=None):
            taken.append(self)
            return super().wait(SOON)

    monkeypatch.setattr(service_file, "threading", SimpleNamespace(Event=Rest))
    return taken


def test_the_next_step_begins_when_a_first_token_has_been_read(rests):
    async def run():
        async with serving() as service:
            read, seen = [], []
            step = service.engine.step

            def noted(now):
                seen.append(len(read))
                return step(now)

            service.engine.step = noted
            answer = service.open([request("a", 3)])
            while not answer.exhausted:
                read += await answer.read()  # a wait with a timeout would read a turn of the loop later
            assert seen[1] == 1
            assert len(rests) == 1

    asyncio.run(run())


def test_background_calls_do_not_keep_the_engine_from_pausing(rests):
    async def run():
        async with serving() as service:
            gate = Gate(service)
            for number in range(service_file.HANDOVER_REQUESTS + 1):
                ahead = request(f"ahead{number}", 20, service_class=BACKGROUND.name)
                service.open([ahead], interval=0)
            answer = service.open([request("a", 3)])
            gate.open.set()
            await read_all(answer)
            assert len(rests) == 1

    asyncio.run(run())


def test_an_arriving_call_pauses_only_background_work(monkeypatch):
    monkeypatch.setattr(service_file, "EXPECT_SECONDS", 3600.0)

    async def run():
        async with serving() as service:
            gate = Gate(service)
            ahead = service.open([request("ahead", 20, service_class=BACKGROUND.name)], interval=0)
            assert not service.awaited
            service.expect()
            assert service.awaited
            gate.open.set()
            await read_all(service.open([request("a", 3)]))
            await asyncio.sleep(0.05)
            assert not ahead.settled
            service.thread.expect(0.0)
            await read_all(service.open([request("b", 3)]))  # who waits for an hour looks again
            await read_all(ahead)
            assert not service.awaited

    asyncio.run(run())


def test_the_engine_does_not_pause_for_many_calls_or_calls_without_streaming(rests):
    async def run():
        async with serving() as service:
            await read_all(service.open([request("a", 3)], interval=0))
            gate = Gate(service)
            names = map(str, range(service_file.HANDOVER_REQUESTS + 1))
            crowd = [service.open([request(name, 3)]) for name in names]
            gate.open.set()
            for answer in crowd:
                await read_all(answer)
            assert not rests

    asyncio.run(run())


def test_a_reader_that_wants_only_the_end_is_woken_once():
    async def run():
        async with serving() as service:
            answer = service.open([request("a", 20)], interval=0)
            reported = await asyncio.wait_for(answer.read(), SOON)
            assert len(tokens_of(reported)) == 20
            assert answer.exhausted

    asyncio.run(run())


def woken(answer: Answer, *heard) -> list[int]:
    """How much its reader has read each time that it was woken, while ``answer`` hears that, one by one."""

    async def run():
        read = []

        async def reader():
            while not answer.exhausted:
                read.append(len(await answer.read()))

        task = asyncio.create_task(reader())
        await asyncio.sleep(0)
        for index, event in heard:
            answer.tell(index, event)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.wait_for(task, SOON)
        return read

    return asyncio.run(run())


def said(index: int, tokens: int = 1):
    return index, Emitted("", (7,) * tokens)


def ended(index: int):
    return index, Finished("", FinishReason.LENGTH, 3, 9, 0)


def test_a_reader_is_woken_by_the_first_token_then_by_so_many_and_by_the_end():
    heard = [*[said(0)] * 9, ended(0)]
    assert woken(Answer([request("a")], 1), *heard) == [1] * 10
    assert woken(Answer([request("a")], 4), *heard) == [1, 4, 4, 1]
    assert woken(Answer([request("a")], 4), said(0), said(0, 2), said(0, 3), said(0), ended(0)) == [1, 2, 2]
    assert woken(Answer([request("a")], 0), *heard) == [10]


def test_sequences_of_one_call_are_reported_together_once_each_has_started():
    pair = [request("a"), request("b")]
    both = [said(0), said(1)]
    assert woken(Answer(pair, 3), said(0), said(0), said(1), *both * 6, ended(0), said(1), ended(1)) == [
        *(1, 2),  # the beginning of each
        *(5, 5),  # three of one, and what the other has
        *(3, 2),  # what is left beside each end
    ]


def test_cached_tokens_are_those_of_the_first_admission():
    async def run():
        async with serving() as service:
            prompt = tuple(range(10))
            await read_all(service.open([request("a", prompt=prompt)]))
            second = service.open([request("b", prompt=prompt)])
            await read_all(second)
            assert second.cached_tokens == [9]
            third = service.open([request("c", prompt=prompt[:4], answered=prompt[4:8])])
            await read_all(third)
            assert third.cached_tokens == [4]  # of the prompt, not of what the answer begins with

    asyncio.run(run())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(2, 1000), RejectReason.QUEUE_FULL), (Limits(10, 8), RejectReason.QUEUE_TOKENS)],
)
def test_the_gate_bounds_what_waits_and_opens_again(limits, reason):
    async def run():
        async with serving(limits) as service:
            gate = Gate(service)
            first = service.open([request("a")])
            with pytest.raises(Refused) as refused:
                service.open([request("b"), request("c")])
            assert refused.value.verdict.reason is reason
            assert refused.value.verdict.retry_after >= 1
            assert service.load().queued_requests == 1
            assert service.load().queued_tokens == 3
            gate.open.set()
            await read_all(first)
            assert service.load()[:2] == (0, 0)
            await read_all(service.open([request("b")]))

    asyncio.run(run())


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    async def run():
        async with serving() as service:
            answer = service.open([request("a")])
            with pytest.raises(InvalidParameter) as error:
                service.open([request("a")])
            assert error.value.param == "request_id"
            await read_all(answer)
            await read_all(service.open([request("a")]))

    asyncio.run(run())


def test_close_tells_the_reader_at_once_and_frees_the_engine():
    async def run():
        async with serving(max_model_len=128) as service:
            gate = Gate(service)
            answer = service.open([request("a", 100)])
            service.close(answer)
            service.close(answer)
            assert end_of(await read_all(answer)) is FinishReason.CANCELLED  # though the engine stands still
            assert service.open_requests() == 1
            gate.open.set()
            assert await service.drain(SOON)
            assert service.open_requests() == 0
            assert service.load().queued_requests == 0
            await service.between_steps(service.engine.check_consistency)
            assert service.engine.scheduler.pool.num_free == service.engine.scheduler.pool.num_blocks

    asyncio.run(run())


def test_a_deadline_ends_a_call_even_when_the_engine_hangs():
    async def run():
        async with serving() as service:
            gate = Gate(service)
            answer = service.open([request("a", deadline=service.now() + 0.05)])
            assert end_of(await read_all(answer)) is FinishReason.TIMEOUT
            gate.open.set()

    asyncio.run(run())


def test_a_stop_string_ends_one_sequence_of_a_call():
    async def run():
        async with serving(max_model_len=128) as service:
            gate = Gate(service)
            answer = service.open([request("a", 100), request("b", 10)])
            service.stop_sequence(answer, 0)
            gate.open.set()
            reported = await read_all(answer)
            assert end_of(reported, 0) is FinishReason.STOP
            assert end_of(reported, 1) is FinishReason.LENGTH

    asyncio.run(run())


def test_a_late_stop_string_does_not_end_a_later_call_with_the_same_id():
    async def run():
        async with serving(max_model_len=128) as service:
            ended = service.open([request("a")])
            await read_all(ended)
            gate = Gate(service)
            later = service.open([request("a", 100)])
            service.stop_sequence(ended, 0)
            gate.open.set()
            assert end_of(await read_all(later)) is FinishReason.LENGTH

    asyncio.run(run())


def test_draining_refuses_what_comes_and_lets_the_rest_finish():
    async def run():
        async with serving() as service:
            gate = Gate(service)
            answer = service.open([request("a")])
            assert not await service.drain(0.01)
            assert service.health().well
            assert not service.health().ready
            with pytest.raises(Refused) as refused:
                service.open([request("b")])
            assert refused.value.verdict.reason is RejectReason.DRAINING
            gate.open.set()
            assert await service.drain(SOON)
            assert end_of(await read_all(answer)) is FinishReason.LENGTH

    asyncio.run(run())


def test_close_all_tells_everybody():
    async def run():
        async with serving() as service:
            gate = Gate(service)
            answers = [service.open([request(name)]) for name in "abc"]
            service.close_all()
            for answer in answers:
                assert end_of(await read_all(answer)) is FinishReason.CANCELLED
            gate.open.set()

    asyncio.run(run())


class BookWithoutTokens(Book):
    fold_tokens = None


def test_a_watcher_without_tokens_gets_all_other_events():
    async def run():
        book, without_tokens = Book(), BookWithoutTokens()
        async with serving(watchers=[book]) as service:
            service.watch(without_tokens)
            await read_all(service.open([request("a")]))
        assert without_tokens.events == [event for event in book.events if not isinstance(event, Emitted)]
        assert any(isinstance(event, Finished) for event in without_tokens.events)

    asyncio.run(run())


def test_watchers_are_folded_in_the_order_in_which_they_were_registered():
    """Some read others: the meter of work reads the cost ledger, which counts tokens."""

    async def run():
        order = []

        class First(Book):
            def fold(self, event, now):
                order.append((self.name, event))

        class Second(First):
            fold_tokens = None

        async with serving() as service:
            for name, kind in (("a", First), ("b", Second), ("c", First), ("d", Second)):
                watcher = kind()
                watcher.name = name
                service.watch(watcher)
            await read_all(service.open([request("r")]))
        stepped = [name for name, event in order if isinstance(event, Stepped)]
        assert stepped == [*"abcd"] * (len(stepped) // 4)
        emitted = [name for name, event in order if isinstance(event, Emitted)]
        assert emitted == [*"ac"] * (len(emitted) // 2)
        assert stepped
        assert emitted

    asyncio.run(run())


def test_watchers_are_folded_off_the_engines_thread_and_cannot_cost_an_answer(caplog):
    async def run():
        book, broken = Book(), Book(broken=True)
        async with serving(watchers=[broken, book]) as service:
            assert end_of(await read_all(service.open([request("a")]))) is FinishReason.LENGTH
            assert book.threads == {threading.get_ident()}
            service.count()
            assert sum(isinstance(event, Finished) for event in book.events) == 1
            assert "a watcher failed" in caplog.text

    asyncio.run(run())


def test_a_client_may_leave_while_its_first_token_is_handed_over():
    class Leaving:
        """A route whose listener is withdrawn by the loop after the engine's thread has read it."""

        begun = False

        def __init__(self):
            self._reads = iter([SimpleNamespace(each_step=True)])

        @property
        def listener(self):
            return next(self._reads, None)

    service = Service(hashing_engine(), Limits(10, 1000))
    service._routes["a"] = Leaving()
    assert service._begins([Emitted("a", (1,))])
    assert not service._begins([Emitted("a", (1,))])


def test_what_an_answer_has_used_is_counted_as_soon_as_it_is_read():
    """The cost of a call stands in its answer, so whoever writes that can have the last step counted first."""

    async def run():
        book = Book()
        async with serving(watchers=[book]) as service:
            await read_all(service.open([request("a")]))
            service.count()
            assert isinstance(book.events[-1], Stepped)
            seen = list(book.events)
            for _ in range(5):
                await asyncio.sleep(0)
            assert book.events == seen

    asyncio.run(run())


def test_many_events_are_counted_piece_by_piece(monkeypatch):
    """A thousand requests that end together do not hold up the loop, and watchers see each event once, in order."""

    async def run():
        book, turns = Book(), 0
        monkeypatch.setattr("headrace.service.service.COUNTED_AT_ONCE", 10)
        monkeypatch.setattr(
            "headrace.service.service.time", SimpleNamespace(perf_counter=itertools.count().__next__)
        )
        service = Service(hashing_engine(), Limits(10, 1000), [book])
        service._loop = asyncio.get_running_loop()
        events = [LookedUp(str(at), Layer.EXACT, Lookup.MISS, 0.0) for at in range(95)]
        service._unfolded.append((events, 0.0))
        monkeypatch.setattr("headrace.service.service.PIECE_SECONDS", 2.5)
        service._count_some()
        while len(book.events) < 95:
            before = len(book.events)
            await asyncio.sleep(0)
            assert len(book.events) - before <= 20
            turns += 1
        assert 4 <= turns <= 6
        assert book.events == events
        service._unfolded.append((events, 0.0))
        service.count()
        assert book.events == events * 2

    asyncio.run(run())


def test_tokens_of_several_steps_are_counted_together_and_an_end_at_once(monkeypatch):
    async def run():
        book, clock = Book(), itertools.count()
        monkeypatch.setattr("headrace.service.service.COUNT_SECONDS", 3600.0)
        monkeypatch.setattr("headrace.service.service.COUNTED_AT_ONCE", 6)
        service = Service(hashing_engine(), Limits(10, 1000), [book])
        service._loop = asyncio.get_running_loop()

        async def counted(*events) -> int:
            service._take(events, next(clock))
            for _ in range(5):  # until the readers have written
                await asyncio.sleep(0)
            return len(book.events)

        pair = Emitted("a", (1,)), Emitted("b", (2,))
        assert [await counted(*pair) for _ in range(4)] == [0, 0, 6, 6]
        assert await counted(Finished("a", FinishReason.STOP, 1, 1, 0)) == 9
        assert await counted(*pair) == 9
        other = Book()
        service.watch(other)  # it gets what happens from now on
        assert len(book.events) == 11
        assert not other.events

    asyncio.run(run())


def test_what_was_noted_last_is_counted_before_the_end():
    async def run():
        book, note = Book(), LookedUp("a", Layer.EXACT, Lookup.MISS, 0.0)
        async with serving(watchers=[book]) as service:
            service.note(note)
        assert book.events == [note]

    asyncio.run(run())


def test_notes_are_counted_with_a_delay_and_at_each_read():
    async def run():
        book, broken = Book(), Book(broken=True)
        async with serving(watchers=[broken, book]) as service:
            notes = [LookedUp(name, Layer.EXACT, Lookup.MISS, 0.0) for name in "abc"]
            service.note(notes[0])
            service.note(notes[1])
            assert not book.events  # who notes it has an answer to write
            service.count()
            assert book.events == notes[:2]  # a watcher that fails costs the others nothing
            service.note(notes[2])
            async with asyncio.timeout(SOON):
                while len(book.events) < 3:
                    await asyncio.sleep(0.001)

    asyncio.run(run())


def test_health_names_a_stall_and_a_failure():
    async def run():
        async with serving(stall_seconds=0.05) as service:
            assert service.health().well
            gate = Gate(service)
            service.open([request("a")])
            await asyncio.sleep(0.15)
            assert "no step has progressed" in service.health().why
            gate.open.set()
            service.runner.pages.clear()
            reported = await read_all(service.open([request("b")]))
            assert end_of(reported) is FinishReason.FAILED
            assert service.health().why == "the engine failed"

    asyncio.run(run())
