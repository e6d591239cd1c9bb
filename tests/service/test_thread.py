import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from headrace.core.events import Arrived, Emitted, Finished
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.service.thread import EngineThread
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import expected_tokens

SOON = 60.0


def request(name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens))


class Listener:
    """Keeps what was delivered, batch by batch, and lets a test wait for an end."""

    def __init__(self) -> None:
        self.batches: list[list] = []
        self.threads: set[int] = set()
        self.changed = threading.Condition()

    def __call__(self, events, now) -> None:
        with self.changed:
            self.batches.append(events)
            self.threads.add(threading.get_ident())
            self.changed.notify_all()

    def of(self, kind: type, name: str) -> list:
        return [e for batch in self.batches for e in batch if isinstance(e, kind) and e.request_id == name]

    def wait_for(self, kind: type, name: str):
        with self.changed:
            assert self.changed.wait_for(lambda: self.of(kind, name), SOON), f"no {kind.__name__} for {name}"
            return self.of(kind, name)[0]


class StubEngine:
    """An engine of one's own making: `step` and `wake_at` are what a test gives."""

    def __init__(self, step, wake_at=lambda now: None) -> None:
        self.step = step
        self.wake_at = wake_at
        self.submitted: list[str] = []

    def submit(self, request, now):
        self.submitted.append(request.id)

    def cancel(self, request_id, why, now): ...


@pytest.fixture
def run():
    """Starts threads and ends them with the test."""
    threads: list[EngineThread] = []

    def start(engine):
        listener = Listener()
        threads.append(EngineThread(engine, listener))
        threads[-1].start()
        return threads[-1], listener

    yield start
    assert all(thread.stop() for thread in threads)


@pytest.mark.parametrize("overlap", [0, 1])
def test_requests_are_answered_on_the_engines_thread(run, overlap):
    engine, _ = hashing_engine(overlap=overlap)
    thread, listener = run(engine)
    for i in range(4):
        thread.submit(request(f"r{i}", prompt=(i, 2, 3)))
    for i in range(4):
        assert listener.wait_for(Finished, f"r{i}").reason is FinishReason.LENGTH
        tokens = [token for event in listener.of(Emitted, f"r{i}") for token in event.tokens]
        assert tokens == expected_tokens((i, 2, 3), 0, 5, frozenset())
    assert listener.threads.isdisjoint({threading.get_ident()})


def test_a_step_delivers_once(run):
    engine, _ = hashing_engine()
    thread, listener = run(engine)
    done = thread.call(
        lambda: [thread.submit(request(f"r{i}")) for i in range(5)]
    )  # in one mail, before a step
    done.result(SOON)
    for i in range(5):
        listener.wait_for(Finished, f"r{i}")
    arrivals = [sum(isinstance(e, Arrived) for e in batch) for batch in listener.batches]
    assert max(arrivals) == 5
    assert len(listener.batches) < 12


def test_cancel_ends_a_request_within_a_step(run):
    engine, _ = hashing_engine(max_model_len=128)
    thread, listener = run(engine)
    thread.submit(request("long", 100))
    thread.cancel("long", FinishReason.CANCELLED)
    thread.cancel("nobody", FinishReason.CANCELLED)
    assert listener.wait_for(Finished, "long").reason is FinishReason.CANCELLED
    assert len(listener.of(Finished, "long")) == 1


def test_an_idle_thread_sleeps(run):
    asked = []
    engine = StubEngine(lambda now: [], lambda now: asked.append(now))
    run(engine)
    time.sleep(0.2)
    assert len(asked) <= 2


def test_it_wakes_at_the_time_that_the_engine_names(run):
    woken = threading.Event()
    begun = time.monotonic()
    due = [begun + 0.05]

    def step(now):
        if now >= begun + 0.05:
            due[0] = None
            woken.set()
        return []

    run(StubEngine(step, lambda now: due[0]))
    assert woken.wait(SOON)


@pytest.mark.parametrize("failures", [1, 2])
def test_events_that_cannot_be_delivered_fail_the_requests_and_do_not_end_the_thread(failures):
    """With two failures, ``a`` is failed together with the next request."""
    listener, left, again = Listener(), [failures], threading.Event()

    def deliver(events, now):
        if left[0] and any(isinstance(event, Finished) for event in events):
            left[0] -= 1
            if not left[0]:
                again.set()
            raise LookupError("no such route")
        listener(events, now)

    engine, _ = hashing_engine()
    thread = EngineThread(engine, deliver)
    thread.start()
    thread.submit(request("a"))
    assert again.wait(SOON)
    thread.submit(request("b"))
    for name in ("a", "b"):
        assert listener.wait_for(Finished, name).reason is FinishReason.FAILED
        assert len(listener.of(Finished, name)) == 1
    assert "no such route" in thread.progress().failure
    assert thread.progress().alive
    assert thread.stop()


def test_a_failed_engine_ends_every_request_once_and_says_so(run):
    engine, runner = hashing_engine()
    thread, listener = run(engine)
    thread.call(lambda: runner.pages.clear()).result(SOON)
    thread.submit(request("a"))
    thread.submit(request("b"))
    for name in ("a", "b"):
        finished = listener.wait_for(Finished, name)
        assert finished.reason is FinishReason.FAILED
        assert "IndexError" not in finished.message
    thread.submit(request("late"))
    assert listener.wait_for(Finished, "late").reason is FinishReason.FAILED
    assert all(len(listener.of(Finished, name)) == 1 for name in ("a", "b", "late"))
    with pytest.raises(RuntimeError):
        thread.call(lambda: None).result(SOON)
    progress = thread.progress()
    assert progress.alive
    assert "IndexError" in progress.failure
    assert progress.open_requests == 0


def test_an_engine_that_cannot_even_tell_its_next_step_fails_too(run):
    def wake_at(now):
        raise ZeroDivisionError

    thread, listener = run(StubEngine(lambda now: [], wake_at))
    thread.submit(request("a"))
    assert listener.wait_for(Finished, "a").reason is FinishReason.FAILED


def test_what_a_call_raises_goes_to_its_caller_alone(run):
    engine, _ = hashing_engine()
    thread, listener = run(engine)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(SOON)
    thread.submit(request("a"))
    assert listener.wait_for(Finished, "a").reason is FinishReason.LENGTH


def test_commands_are_followed_in_their_order_except_calls_that_are_to_come_last(run):
    began, goes_on = threading.Event(), threading.Event()
    engine = StubEngine(lambda now: [])
    thread, _ = run(engine)
    thread.call(lambda: began.set() or goes_on.wait(SOON))
    assert began.wait(SOON)  # what comes now is read together
    last = thread.call(lambda: list(engine.submitted), last=True)
    before = thread.call(lambda: list(engine.submitted))
    thread.submit(request("a"))
    after = thread.call(lambda: list(engine.submitted))
    goes_on.set()
    assert [each.result(SOON) for each in (last, before, after)] == [["a"], [], ["a"]]


def test_progress_counts_the_time_that_work_waits_for_a_step(run):
    engine = StubEngine(lambda now: [])  # takes a request and never says anything of it
    thread, _ = run(engine)
    time.sleep(0.1)
    assert thread.progress().stalled_seconds == 0.0  # idle is not stalled
    began = time.monotonic()
    thread.submit(request("a"))
    time.sleep(0.1)
    while not engine.submitted:
        time.sleep(0.001)
    stalled = thread.progress().stalled_seconds
    assert 0.05 < stalled <= time.monotonic() - began
    assert thread.progress().open_requests == 1


def test_a_hanging_step_counts_as_stalled(run):
    release = threading.Event()
    thread, _ = run(StubEngine(lambda now: release.wait(SOON) and []))
    thread.submit(request("a"))
    time.sleep(0.1)
    assert thread.progress().stalled_seconds > 0.05
    release.set()


def test_stop_ends_the_thread():
    engine, _ = hashing_engine()
    thread = EngineThread(engine, Listener())
    thread.start()
    assert thread.stop()
    assert not thread.progress().alive


def test_what_never_began_can_be_stopped():
    assert EngineThread(StubEngine(lambda now: []), Listener()).stop()


def test_no_step_begins_while_a_request_is_expected():
    clock = [0.0]
    stepped = threading.Event()

    def step(now):
        stepped.set()
        return []

    thread = EngineThread(
        StubEngine(step, wake_at=lambda now: now), lambda events, now: None, lambda: clock[0]
    )
    thread.expect(3600.0)
    thread.start()
    try:
        assert not stepped.wait(0.05)
        thread.submit(request("a"))
        assert stepped.wait(SOON)
    finally:
        thread.stop()


def test_a_foreground_request_sets_the_interrupt_and_reading_the_mailbox_clears_it():
    looked = threading.Event()

    def wake_at(now):
        looked.set()

    bell = threading.Event()
    thread = EngineThread(StubEngine(lambda now: [], wake_at), lambda events, now: None, interrupt=bell)
    thread.submit(replace(request("idle"), service_class="background"))
    assert not bell.is_set()
    thread.submit(request("real"))
    assert bell.is_set()
    bell.clear()
    thread.expect(0.0)
    assert bell.is_set()
    thread.start()
    try:
        assert looked.wait(SOON)
        assert not bell.is_set()
    finally:
        thread.stop()


def test_a_request_that_does_not_come_is_not_waited_for():
    stepped = threading.Event()

    def step(now):
        stepped.set()
        return []

    thread = EngineThread(StubEngine(step, wake_at=lambda now: now), lambda events, now: None)
    thread.expect(0.01)
    thread.start()
    try:
        assert stepped.wait(SOON)
    finally:
        thread.stop()


def test_the_end_of_the_interpreter_waits_for_the_thread():
    """A daemon thread that comes back from torch after the interpreter has ended aborts the process."""
    program = """
import atexit, time
from tests.service.test_thread import StubEngine
from headrace.service.thread import EngineThread

def step(now):
    time.sleep(0.001)
    return []

thread = EngineThread(StubEngine(step, lambda now: now), lambda events, now: None)
atexit.register(lambda: print(thread.progress().alive))
thread.start()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "False\n"
