"""What the edge alone knows of a call: its sequences and its metadata, for its explanation, and the call itself."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakValueDictionary

from headrace.serve.http.generation.call import Call

KEPT = 1000


class CallNote(NamedTuple):
    """One call: the engine's ids of its sequences, and what the caller wanted to find again."""

    request_ids: tuple[str, ...]
    metadata: dict[str, str]


class CallNotes:
    """The last `KEPT` calls that have more to tell than their one sequence's events."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, CallNote] = OrderedDict()
        self._calls: WeakValueDictionary[str, Call] = WeakValueDictionary()

    def put(self, call: Call, metadata: dict[str, str] | None) -> None:
        """Remember a call, in place of an older one of the same id."""
        self._calls[call.id] = call
        self._notes.pop(call.id, None)
        if metadata or len(call.choices) > 1:
            self._notes[call.id] = CallNote(tuple(c.request.id for c in call.choices), metadata or {})
            if len(self._notes) > KEPT:
                self._notes.popitem(last=False)

    def get(self, call_id: str) -> CallNote:
        """What is known of a call; of an unknown one, that it has one sequence of the same id."""
        return self._notes.get(call_id) or CallNote((call_id,), {})

    def under_way(self, call_id: str) -> Call | None:
        """The call of this id that is being answered."""
        call = self._calls.get(call_id)
        return None if call is None or call.settled else call
