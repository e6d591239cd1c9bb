"""Retains the computed prompts of sessions: follows their requests, and tells the engine which blocks to let go.

A request of a session asks for retention when it is submitted (`core.request.Retention`). When it has ended, its prompt
replaces that of the session's request before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.cache.prefix.sessions import Dropped, SessionBook
from headrace.core.events import Event, Finished, Spared
from headrace.core.request import DEFAULT_RETENTION, Request

MOST_OPEN = 10_000
"""Requests of sessions that are followed at once."""

REPLACED_RETENTION = 0
"""The retention priority of blocks that a newer prompt of their session has replaced: they are evicted first."""

Retain = Callable[[Sequence[bytes], int], object]
"""Sets the retention priority of cached blocks by their keys."""


class Turn(NamedTuple):
    """A request of a session: its name, its name until now if that changes, and whether the session ends with it."""

    session: str
    continues: str = ""
    releases: bool = False


class Sessions:
    """A `core.ports.Watcher` that follows the requests of sessions. ``retain`` is called without waiting for it."""

    def __init__(self, book: SessionBook, block_size: int, retain: Retain) -> None:
        self._book = book
        self._block_size = block_size
        self._retain = retain
        self._open: OrderedDict[str, tuple[Request, Turn]] = OrderedDict()

    def enter(self, request: Request, turn: Turn) -> None:
        """A request of a session has been submitted; its events are folded later."""
        self._open[request.id] = (request, turn)
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)

    def fold(self, event: Event, now: float) -> None:
        if not isinstance(event, Finished | Spared):
            return
        request, turn = self._open.pop(event.request_id, (None, None))
        if request is None or turn is None:
            return
        if isinstance(event, Finished) and event.output_tokens:
            root = root_key(request.salt, request.adapter)
            keys = chained_keys(root, request.tokens, self._block_size)
            self._apply(self._book.turn(request.tenant, turn.session, keys, turn.continues))
        if turn.releases:
            self.release(request.tenant, turn.session)

    def release(self, tenant: str, session: str) -> bool:
        """A session has ended: its blocks are retained no longer than others. Returns whether it was known."""
        dropped = self._book.release(tenant, session)
        if dropped is not None:
            self._apply(dropped)
        return dropped is not None

    def _apply(self, dropped: Dropped) -> None:
        if dropped.replaced:
            self._retain(dropped.replaced, REPLACED_RETENTION)
        if dropped.released:
            self._retain(dropped.released, DEFAULT_RETENTION)
