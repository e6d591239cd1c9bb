"""The other ranks of a model as threads of the test's process: the same workers and process groups, without starts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from headrace.compute.mover import Copied
from headrace.config import ModelOptions
from headrace.fleet.others import RankFailed
from headrace.fleet.worker import Worker


class ThreadRanks:
    """`headrace.fleet.others.Others` as threads; a rank is lost by `lose`."""

    address = "127.0.0.1"

    @classmethod
    def of(cls, model: ModelOptions) -> ThreadRanks:
        """Those of a model."""
        return cls(model.tensor_parallel_size * model.pipeline_parallel_size)

    def __init__(self, size: int) -> None:
        self._size = size
        self._mail: list[queue.SimpleQueue[bytes | None]] = []
        self._replies: list[queue.SimpleQueue[dict[str, Any] | Exception]] = []
        self._threads: list[threading.Thread] = []
        self._failure = ""
        self._heard: Callable[[int, Copied], None] = lambda rank, copied: None

    def start(self) -> None:
        self.stop()
        self._failure = ""
        self._mail = [queue.SimpleQueue() for _ in range(1, self._size)]
        self._replies = [queue.SimpleQueue() for _ in range(1, self._size)]
        self._threads = [
            threading.Thread(target=self._work, args=(rank, mail, replies), daemon=True)
            for rank, (mail, replies) in enumerate(zip(self._mail, self._replies, strict=True), 1)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, messages: Sequence[bytes | None]) -> None:
        for mail, message in zip(self._mail, messages, strict=True):
            if message is not None:
                mail.put(message)

    def replies(self) -> list[dict[str, Any]]:
        replies = [each.get(timeout=60) for each in self._replies]
        for reply in replies:
            if isinstance(reply, Exception):
                raise RankFailed(str(reply)) from reply
        return [reply for reply in replies if not isinstance(reply, Exception)]

    def listen(self, heard: Callable[[int, Copied], None]) -> None:
        self._heard = heard

    def failure(self, seconds: float = 0.0) -> str:
        return self._failure

    def stop(self) -> None:
        for mail in self._mail:
            mail.put(None)
        for thread in self._threads:
            thread.join(60)
        self._mail, self._replies, self._threads = [], [], []

    def close(self) -> None:
        self.stop()

    def lose(self, why: str) -> None:
        self._failure = why

    def _work(
        self, rank: int, mail: queue.SimpleQueue[bytes | None], replies: queue.SimpleQueue[Any]
    ) -> None:
        worker = Worker(lambda copied: self._heard(rank, copied))
        try:
            while (message := mail.get()) is not None:
                if (reply := worker.answer(message)) is not None:
                    replies.put(reply)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            replies.put(error)
        finally:
            worker.close()
