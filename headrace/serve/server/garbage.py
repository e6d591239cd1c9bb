"""Python's search for garbage, which stops all threads, waits until nobody is being answered.

Nearly everything is freed by counting references as soon as nobody has it. A search finds objects that hold each other
in a circle, and walks over all that are alive for it: 60 to 150 ms for 50,000 to 100,000 objects, in the middle of
whichever step's turn it is. What is young is searched often, as ever, for that is soon done.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

NEVER = 1_000_000_000
"""Searches of what is young between two of everything: more than there will be."""

REST_SECONDS = 30.0
"""At least, between two searches of everything."""

SHARE = 0.001
"""Of the time that such searches may take, however much is alive."""

PATIENCE = 10.0
"""So many times the rest is waited for a quiet moment; then it is searched all the same."""


class Garbage:
    """Chooses the moment; ``busy`` says whether somebody waits, ``clock`` seconds."""

    def __init__(self, busy: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._busy = busy
        self._clock = clock
        self._ended = clock()
        self._rest = REST_SECONDS

    def take_over(self) -> None:
        """From now on nothing but `tick` searches everything; what start-up has made stays and is never searched."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._ended = self._clock()

    def tick(self) -> bool:
        """Search now if it is time; whether it was. To be called several times a second."""
        began = self._clock()
        passed = began - self._ended
        if passed < self._rest or (self._busy() and passed < PATIENCE * self._rest):
            return False
        gc.collect()
        self._ended = self._clock()
        self._rest = max(REST_SECONDS, (self._ended - began) / SHARE)
        return True
