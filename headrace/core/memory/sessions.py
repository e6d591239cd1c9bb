"""The prompts of sessions: which blocks a newer prompt replaces, and a limit of retained blocks for each tenant.

```
 turn 3   system tools  m1 m2 m3 m4            retained while the session is used
 turn 4   system tools  m1 m2 m3' ...          m3' differs: the blocks of m3 and m4 will not be found again
```
It uses block keys only. Blocks that another session of the tenant also uses stay retained.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_SESSIONS = 1_000
"""Sessions of one tenant; of more, the least recently used one is released."""

MAX_TENANTS = 1_000


class Dropped(NamedTuple):
    """Keys of blocks that no session of the tenant needs any more: ``replaced`` by a newer prompt of their session,
    or ``released`` because it ended or because the tenant has too many.
    """

    replaced: tuple[bytes, ...] = ()
    released: tuple[bytes, ...] = ()


class _Tenant:
    """The sessions of a tenant, the least recently used first, and how many sessions need each block."""

    __slots__ = ("sessions", "uses")

    def __init__(self) -> None:
        self.sessions: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()
        self.uses: Counter[bytes] = Counter()

    def add(self, keys: Sequence[bytes]) -> None:
        self.uses.update(keys)

    def remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of ``keys`` that no session needs any more."""
        unused = []
        for key in keys:
            self.uses[key] -= 1
            if not self.uses[key]:
                del self.uses[key]
                unused.append(key)
        return unused


class SessionBook:
    """All sessions. A tenant retains at most ``max_blocks``."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def blocks(self, tenant: str) -> int:
        """Number of different blocks that the sessions of a tenant need."""
        known = self._tenants.get(tenant)
        return 0 if known is None else len(known.uses)

    def turn(self, tenant: str, session: str, keys: Sequence[bytes], continues: str = "") -> Dropped:
        """A session has a new prompt with the blocks ``keys``; ``continues`` is its name until now, if it changes."""
        known = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        kept = tuple(keys[: self._max_blocks])
        before = known.sessions.pop(continues or session, ())
        common = next(
            (at for at, (a, b) in enumerate(zip(before, kept, strict=False)) if a != b),
            min(len(before), len(kept)),
        )
        known.add(kept[common:])
        replaced = known.remove(before[common:])
        known.sessions[session] = kept
        released = [key for key in keys[self._max_blocks :] if key not in known.uses]
        while len(known.uses) > self._max_blocks or len(known.sessions) > MAX_SESSIONS:
            oldest = next(iter(known.sessions))
            released += known.remove(known.sessions.pop(oldest))
        if len(self._tenants) > MAX_TENANTS:
            _, forgotten = self._tenants.popitem(last=False)
            released += forgotten.uses
        return Dropped(tuple(replaced), tuple(released))

    def release(self, tenant: str, session: str) -> Dropped | None:
        """A session has ended; None if it is not known."""
        known = self._tenants.get(tenant)
        if known is None or session not in known.sessions:
            return None
        released = known.remove(known.sessions.pop(session))
        if not known.sessions:
            del self._tenants[tenant]
        return Dropped(released=tuple(released))
