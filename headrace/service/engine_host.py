"""Runs an engine for a server in another process: the other end of `engine_process`.

One thread reads the server's messages into the mailbox of the engine thread, which sends the events of each step
itself. A second thread sends the counts that the server shows, when they have changed; a third one takes requests with
images, whose rows it reads first. Other requests need not wait for that.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from headrace.core.events import Event
from headrace.core.request import FinishReason, Request
from headrace.service.engine_process import READ_BYTES, FromEngine, ToEngine, as_it_is
from headrace.service.packing import Frames, Plain, frame, pack_events, unpacked
from headrace.service.thread import EngineThread, StepInterrupt, Steps

logger = logging.getLogger(__name__)

COUNT_SECONDS = 0.5
"""How often the counts are compared with those that were sent last."""


class EngineHost:
    """Serves an engine over ``connection``.

    ``answer(name, arguments)`` answers a question of the server. It is called between two steps, those ``beside`` them
    on a thread of their own; a future that it returns is awaited elsewhere. ``counts`` returns what the server shows of
    the engine: it is sent with the events of each step, and when it has changed without one. ``received`` makes the
    engine's request of one with images, which may take long.
    """

    def __init__(
        self,
        connection: socket.socket,
        engine: Steps,
        answer: Callable[[str, tuple[Plain, ...]], Plain],
        counts: Callable[[], Plain],
        interrupt: StepInterrupt | None = None,
        beside: Container[str] = (),
        received: Callable[[Request], Request] = as_it_is,
    ) -> None:
        self._connection = connection
        self._beside = beside
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headrace-engine-questions")
        self._images = ThreadPoolExecutor(1, thread_name_prefix="headrace-request-images")
        self._awaited = set[str]()  # requests that this thread has, or will have
        self._answer = answer
        self._received = received
        self._counts = counts
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._sent_counts: Plain = None
        self._thread = EngineThread(engine, self._deliver, interrupt=interrupt)

    def run(self) -> bool:
        """Serve until the server asks to stop, or has ended; returns whether the engine thread stopped in time."""
        self._thread.start()
        counting = threading.Thread(target=self._send_counts, name="headrace-engine-counts", daemon=True)
        counting.start()
        timeout = self._receive()
        self._ended.set()
        counting.join()
        for each in (self._worker, self._images):
            each.shutdown(wait=False, cancel_futures=True)
        halted = self._thread.stop(timeout) and not self._thread.progress().failure
        self._send((FromEngine.HALTED, halted))
        return halted

    def call(self, function: Callable[[], Any], last: bool = False) -> Future[Any]:
        """See `EngineThread.call`."""
        return self._thread.call(function, last)

    def closed(self, saved: str) -> None:
        """Report what was saved for the next process, after the last step."""
        self._send((FromEngine.CLOSED, saved))

    def _receive(self) -> float:
        """Take messages until one of them, or the end of the server, asks to stop; returns how long that may take."""
        frames = Frames()
        while True:
            try:
                received = self._connection.recv(READ_BYTES)
            except OSError:
                received = b""
            if not received:
                logger.warning("the server has ended, so its engine stops")
                return 0.0
            for message in frames.feed(received):
                if message[0] == ToEngine.STOP:
                    timeout: float = message[1]
                    return timeout
                self._take(message)

    def _take(self, message: Plain) -> None:
        match message:
            case (ToEngine.SUBMIT, request):
                self._submit(unpacked(Request, request))
            case (ToEngine.CANCEL, request_id, why) if request_id in self._awaited:  # once it is submitted
                self._images.submit(self._thread.cancel, request_id, FinishReason(why))
            case (ToEngine.CANCEL, request_id, why):
                self._thread.cancel(request_id, FinishReason(why))
            case (ToEngine.EXPECT, seconds):
                self._thread.expect(seconds)
            case (ToEngine.ASK, number, name, arguments) if name in self._beside:
                self._worker.submit(self._answer_to, number, name, arguments)
            case (ToEngine.ASK, number, name, arguments):
                self._thread.call(lambda: self._answer_to(number, name, arguments))

    def _submit(self, request: Request) -> None:
        if request.images:
            self._awaited.add(request.id)
            self._images.submit(self._submit_with_images, request)
        else:
            self._thread.submit(request)

    def _submit_with_images(self, request: Request) -> None:
        try:
            received = self._received(request)
        except Exception as error:
            logger.exception("the images of a request cannot be read")
            with self._sending:
                self._fail(f"{type(error).__name__}: {error}")
        else:
            self._thread.submit(received)
            self._awaited.discard(request.id)

    def _answer_to(self, number: int, name: str, arguments: tuple[Plain, ...]) -> None:
        """Answer a question, or say why it has no answer."""
        self._answer_from(number, name, partial(self._answer, name, arguments))

    def _answer_from(self, number: int, name: str, source: Callable[[], Plain]) -> None:
        error, value = None, None
        try:
            value = source()
        except Exception as raised:
            logger.exception("%s failed", name)
            error = f"{type(raised).__name__}: {raised}"
        if isinstance(value, Future):
            value.add_done_callback(partial(self._answered, number, name))
        else:
            self._send((FromEngine.ANSWER, number, error, value))

    def _answered(self, number: int, name: str, answer: Future[Plain]) -> None:
        """Send an answer that came later; nothing waits for one that was cancelled."""
        if not answer.cancelled():
            self._answer_from(number, name, answer.result)

    def _deliver(self, events: list[Event], now: float) -> None:
        packed = pack_events(events)
        with self._sending:
            progress = self._thread.progress()
            if progress.failure:
                self._fail(progress.failure)
            else:
                self._write((FromEngine.EVENTS, now, progress.steps, self._count(), packed))

    def _send_counts(self) -> None:
        while not self._ended.is_set():
            with self._sending:
                before, failure = self._sent_counts, self._thread.progress().failure
                if failure:
                    self._fail(failure)
                elif self._count() != before:
                    self._write((FromEngine.COUNTS, self._sent_counts))
            self._ended.wait(COUNT_SECONDS)

    def _count(self) -> Plain:
        """The counts, while no other message can be sent: a later message never has earlier counts."""
        self._sent_counts = self._counts()
        return self._sent_counts

    def _fail(self, failure: str) -> None:
        """The engine has failed: its requests belong to another process, so this one ends."""
        self._write((FromEngine.FAILED, failure))
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send(self, message: Plain) -> None:
        with self._sending:
            self._write(message)

    def _write(self, message: Plain) -> None:
        """Send a message. If the server has ended, nothing is sent, and `_receive` ends everything."""
        sent = frame(message)
        with suppress(OSError):
            self._connection.sendall(sent)
