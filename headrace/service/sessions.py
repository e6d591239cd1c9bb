"""Retains the computed prompts of sessions: follows their requests, and lowers the priority of replaced blocks.

A request of a session asks for retention when it is submitted (`core.request.Retention`). When it has ended, its prompt
replaces that of the session's previous request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.events import Event, Finished, Spared
from headrace.core.images import contents
from headrace.core.memory.sessions import Dropped, SessionBook
from headrace.core.request import DEFAULT_RETENTION, Request

MOST_OPEN = 10_000
"""Maximum open requests of sessions that are followed."""

REPLACED_RETENTION = 0
"""The retention priority of blocks that a newer prompt of their session has replaced: they are evicted first."""

Retain = Callable[[Sequence[bytes], int], object]
"""Sets the retention priority of cached blocks by their keys."""


class Turn(NamedTuple):
    """A request of a session: the session's name, its previous name if it changes, and whether the session ends."""

    session: str
    continues: str = ""
    releases: bool = False


class Sessions:
    """A `core.ports.Watcher` that follows the requests of sessions. ``retain`` must not block."""

    fold_tokens = None

    def __init__(self, book: SessionBook, block_size: int, retain: Retain) -> None:
        self._book = book
        self._block_size = block_size
        self._retain = retain
        self._open: OrderedDict[str, tuple[Request, Turn]] = OrderedDict()

    def enter(self, request: Request, turn: Turn) -> None:
        """Follow a submitted request of a session, before its events are folded."""
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
            keys = chained_keys(root, contents(request.tokens, request.images), self._block_size)
            self._apply(self._book.turn(request.tenant, turn.session, keys, turn.continues))
        if turn.releases:
            self.release(request.tenant, turn.session)

    def release(self, tenant: str, session: str) -> bool:
        """End a session, so that its blocks are no longer retained. Returns whether it was known."""
        dropped = self._book.release(tenant, session)
        if dropped is not None:
            self._apply(dropped)
        return dropped is not None

    def _apply(self, dropped: Dropped) -> None:
        if dropped.replaced:
            self._retain(dropped.replaced, REPLACED_RETENTION)
        if dropped.released:
            self._retain(dropped.released, DEFAULT_RETENTION)
