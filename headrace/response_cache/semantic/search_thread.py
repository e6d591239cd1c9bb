"""The thread of the semantic cache: embeds messages, searches the index, and decides which entry may be served.

Lookups run first, in order of arrival; one whose deadline has passed is not embedded. Indexing, audits and removals run
while no lookup waits, and for a limited share of the time, because a lookup that arrives meanwhile waits for their end.
If the embedder raises, only the current lookup fails.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import faiss

from headrace.core.ports import Embedder
from headrace.response_cache.ports import Change
from headrace.response_cache.rules.audits import gist, same_answer
from headrace.response_cache.rules.guards import traits
from headrace.response_cache.rules.judge import Decline, Doubt, Judge, Serve
from headrace.response_cache.semantic.pair_book import PairBook
from headrace.response_cache.semantic.partitions import Partitions, cosine, vector_of
from headrace.response_cache.semantic.rows import Row, RowForm, RowStore, SharedRows, unpacked

logger = logging.getLogger(__name__)

_REMEMBERED = 1024

_TOGETHER = 4
"""Maximum number of answers embedded in one call."""

_TASK_SHARE = 0.25  # see docs/decisions/caches.md#lookups-in-time
"""The share of time that indexing, audits and removals may take."""

_BACKLOG = 1000
"""Maximum number of queued tasks; further responses are not indexed."""


class Proposal(NamedTuple):
    """An entry that may be served, the similarity of its message to the requested one, and that message.

    ``certificate`` says which certificate it is served by, if there is one.
    """

    key: bytes
    similarity: float
    question: str
    certificate: str = ""


class Computed(NamedTuple):
    """A computed response; ``spell`` returns its text, ``instead`` is the entry that would have been served."""

    key: bytes
    partition: bytes
    question: str
    spell: Callable[[], str]
    tags: tuple[str, ...]
    expires: float
    instead: bytes | None = None


class _Search(NamedTuple):
    partition: bytes
    key: bytes
    text: str
    until: float
    tenant: str
    verdict: Future[Proposal | Decline | None]


class _Note(NamedTuple):
    """A queued task: see `SearchThread.note`."""

    computed: Computed
    audited: Callable[[bool], None] | None


class SearchThread:
    """Answers `search` from the rows that `note` has added.

    Args:
        embedder: used only by this thread.
        judge: decides which entry may be served.
        rows: the index in memory.
        row_store: the file that stores the rows across restarts, if there is one.
        shared: receives the rows that this server has kept, for other servers.
        pairs: records decisions, and has the judge of each tenant; without it, ``judge`` decides for all.
        wall: Unix time.
        clock: seconds, for deadlines.
    """

    def __init__(
        self,
        embedder: Embedder,
        judge: Judge,
        rows: Partitions,
        row_store: RowStore | None = None,
        shared: SharedRows | None = None,
        pairs: PairBook | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._embedder = embedder
        self._judge = judge
        self._rows = rows
        self._row_store = row_store
        self._shared = shared
        self._pairs = pairs
        self._wall = wall
        self._clock = clock
        self._searches: deque[_Search] = deque()
        self._tasks: deque[_Note | Callable[[], None]] = deque()
        self._vectors: OrderedDict[bytes, bytes] = (
            OrderedDict()
        )  # of recent messages, by the keys of their requests
        self._work = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name="headrace-semantic", daemon=True)
        self.facts = rows.facts

    def start(self) -> None:
        """Start the thread; it first rebuilds the rows from the file."""
        self._thread.start()
        # A daemon thread that comes back from torch after the interpreter's end aborts the process.
        atexit.register(self.stop)

    def stop(self, timeout: float = 2.0) -> None:
        """Finish queued tasks, for at most ``timeout`` seconds, and stop."""
        with self._work:
            self._ending = True
            self._work.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if not self._thread.is_alive():
            atexit.unregister(self.stop)
            if self._row_store is not None:
                self._row_store.close()

    def search(
        self, partition: bytes, key: bytes, text: str, until: float, tenant: str = ""
    ) -> Future[Proposal | Decline | None]:
        """The entry that may be served for a message, or why none; None if ``until`` passes first."""
        verdict: Future[Proposal | Decline | None] = Future()
        with self._work:
            self._searches.append(_Search(partition, key, text, until, tenant, verdict))
            self._work.notify()
        return verdict

    def note(self, computed: Computed, audited: Callable[[bool], None] | None = None) -> None:
        """Index a response. ``audited`` receives whether the entry served instead would have been equal."""
        if len(self._tasks) < _BACKLOG:
            self._add_task(_Note(computed, audited))

    def forget(self, key: bytes) -> None:
        """Remove a wrong entry, so that no server serves it to similar requests."""
        self._add_task(lambda: self._forget_wrong(key))

    def lose(self, key: bytes) -> None:
        """Remove the row of an entry that is not found any more."""
        self._add_task(lambda: self._drop([key] if self._rows.forget(key) else []))

    def forget_tag(self, tag: str) -> None:
        """Remove all entries with a tag."""
        self._add_task(lambda: self._drop(self._rows.forget_tag(tag)))

    def take(self, changes: Sequence[Change], form: RowForm) -> Future[int]:
        """Index rows of other servers, and forget those that they have deleted; returns how many are damaged."""
        damaged: Future[int] = Future()
        self._add_task(lambda: self._take(changes, form, damaged))
        return damaged

    def _add_task(self, task: _Note | Callable[[], None]) -> None:
        with self._work:
            self._tasks.append(task)
            self._work.notify()

    def _loop(self) -> None:
        faiss.omp_set_num_threads(1)  # only for this thread
        self._rebuild()
        pause_ends = 0.0
        while True:
            search = task = None
            with self._work:
                while not self._searches:
                    pause = 0.0 if self._ending else pause_ends - self._clock()
                    if pause <= 0 and (self._tasks or self._ending):
                        break
                    self._work.wait(pause if self._tasks else None)
                if self._searches:
                    search = self._searches.popleft()
                elif self._tasks:
                    task = self._next_task()
                else:
                    return
            if search is not None:
                self._answer(search)
            elif task is not None:
                began = self._clock()
                try:
                    task()
                except Exception:
                    logger.exception("a background task of the semantic cache failed")
                ended = self._clock()
                pause_ends = ended + (ended - began) * (1 / _TASK_SHARE - 1)

    def _next_task(self) -> Callable[[], None]:
        """The first task; consecutive notes are combined."""
        first = self._tasks.popleft()
        if not isinstance(first, _Note):
            return first
        notes = [first]
        while self._tasks and len(notes) < _TOGETHER and isinstance(following := self._tasks[0], _Note):
            notes.append(following)
            self._tasks.popleft()
        return partial(self._note, notes)

    def _rebuild(self) -> None:
        if self._row_store is None:
            return
        try:
            for row in self._row_store.load(self._wall()):
                self._rows.keep(row)
        except Exception:
            logger.exception("the rows of the semantic cache cannot be read: it starts empty")

    def _answer(self, search: _Search) -> None:
        if not search.verdict.set_running_or_notify_cancel():
            return
        try:
            late = search.until <= self._clock()
            verdict = None if late else self._decide(search, self._embedder.embed([search.text])[0])
        except Exception as error:
            search.verdict.set_exception(error)
        else:
            search.verdict.set_result(verdict)

    def _decide(self, search: _Search, packed: bytes | None) -> Proposal | Decline:
        if packed is None:
            return Decline(Doubt.TOO_LONG)
        self._vectors[search.key] = packed
        if len(self._vectors) > _REMEMBERED:
            self._vectors.popitem(last=False)
        near = self._rows.nearest(search.partition, vector_of(packed))
        entries, pairs = self._rows.size(search.partition), self._pairs
        judge = self._judge if pairs is None else pairs.judge(search.tenant)
        verdict = judge.decide(search.text, near, entries)
        if pairs is not None:
            pairs.record(search.tenant, search.partition, search.text, near, entries, verdict)
        if not isinstance(verdict, Serve):
            return verdict
        row = self._rows.row(verdict.neighbour.row)
        assert row is not None  # this thread has just found it
        self._rows.served(verdict.neighbour.row)
        certificate = "" if pairs is None else pairs.certificate(search.tenant, entries)
        return Proposal(row.key, verdict.neighbour.cosine, row.question, certificate)

    def _take(self, changes: Sequence[Change], form: RowForm, damaged: Future[int]) -> None:
        if not damaged.set_running_or_notify_cancel():
            return
        try:
            rows, keys, count = unpacked(changes, form, self._wall())
            forgotten = [*(key for key in keys if self._rows.forget(key)), *self._rows.expire(self._wall())]
            new = [row for row in rows if self._rows.find(row.key) != row]
            for row in new:
                forgotten += self._rows.keep(row)
            self._drop(forgotten, new)
        except Exception as error:
            damaged.set_exception(error)
        else:
            damaged.set_result(count)

    def _note(self, notes: list[_Note]) -> None:
        answers = [gist(note.computed.spell()) for note in notes]
        known = [self._vectors.pop(note.computed.key, None) for note in notes]
        unknown = [n.computed.question for n, vector in zip(notes, known, strict=True) if vector is None]
        vectors = self._embedder.embed([*answers, *unknown])
        more = iter(vectors[len(answers) :])
        for note, answer, vector, answered in zip(notes, answers, known, vectors, strict=False):
            self._keep(note, vector or next(more), answer, answered or b"")

    def _keep(self, note: _Note, vector: bytes | None, answer: str, answer_vector: bytes) -> None:
        """Index one response. ``vector`` is None if its message is too long to be embedded."""
        computed = note.computed
        if note.audited is not None and computed.instead is not None:
            self._audit(computed.instead, answer, answer_vector, note.audited)
        if vector is None or traits(computed.question).timely:
            return
        near = self._rows.nearest(computed.partition, vector_of(vector))
        row = Row(
            key=computed.key,
            partition=computed.partition,
            question=computed.question,
            vector=vector,
            answer=self._rows.class_of(computed.key, near, answer, answer_vector),
            answer_text=answer,
            answer_vector=answer_vector,
            tags=computed.tags,
            expires=computed.expires,
        )
        self._drop([*self._rows.expire(self._wall()), *self._rows.keep(row)], [row])
        if self._shared is not None:
            self._shared.put(row)

    def _audit(self, instead: bytes, answer: str, vector: bytes, audited: Callable[[bool], None]) -> None:
        row = self._rows.find(instead)
        if row is None:
            return  # it was removed meanwhile: nothing would be served
        right = same_answer(answer, row.answer_text, cosine(vector, row.answer_vector))
        if not right:
            self._forget_wrong(instead)
        audited(right)

    def _forget_wrong(self, key: bytes) -> None:
        """Also if it is not in memory: other servers may have it, or this one after its next start."""
        self._rows.forget(key)
        self._drop([key])
        if self._shared is not None:
            self._shared.delete(key)

    def _drop(self, keys: Iterable[bytes], kept: Iterable[Row] = ()) -> None:
        """Write to the file what the index has of ``kept``, and delete what it has not of ``keys``."""
        if self._row_store is not None:
            find = self._rows.find
            self._row_store.write(
                [row for row in kept if find(row.key) is row], [key for key in keys if find(key) is None]
            )
