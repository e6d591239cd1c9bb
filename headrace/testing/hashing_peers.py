"""Peers of a hashing runner: they have the blocks of some prompts, and answer after some steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.images import ImageSpan, contents
from headrace.core.peers import NO_OFFER, Inquiry, Offer
from headrace.core.plan import Tier
from headrace.testing.hashing_runner import HashingRunner, mix, seen


class HashingPeers:
    """`core.peers.Peers` for `HashingRunner`; an inquiry is answered after ``delay()`` calls of `tick`."""

    def __init__(self, delay: Callable[[], int] = lambda: 0) -> None:
        self.runner: HashingRunner | None = None
        self.asked: list[Inquiry] = []
        self.lost = False
        self._delay = delay
        self._pages: dict[bytes, list[int]] = {}
        self._waiting: deque[tuple[int, Inquiry]] = deque()
        self._ticks = 0

    def hold(
        self, tokens: Sequence[int], block_size: int, salt: str = "", images: Sequence[ImageSpan] = ()
    ) -> None:
        """Give the peers the blocks of this prompt."""
        state, states = 0, []
        for token in seen(tokens, images):
            state = mix(state, token)
            states.append(state)
        for i, key in enumerate(chained_keys(root_key(salt, ""), contents(tokens, images), block_size)):
            self._pages[key] = states[i * block_size : (i + 1) * block_size]

    def ask(self, inquiry: Inquiry) -> None:
        self.asked.append(inquiry)
        self._waiting.append((self._ticks + self._delay(), inquiry))
        self._answer()

    def assign(self, block: int, peer: str, key: bytes) -> None:
        if self.runner is not None:
            self.runner.tiers[Tier.PEER][block] = self._pages[key]

    def tick(self) -> None:
        """Advance time by one step, and answer the inquiries that are due."""
        self._ticks += 1
        self._answer()

    def answer_all(self) -> None:
        """Answer all inquiries at once from now on."""
        self._delay, self._ticks = (lambda: 0), self._ticks + 1_000_000
        self._answer()

    def _answer(self) -> None:
        for _ in range(len(self._waiting)):
            due, inquiry = self._waiting.popleft()
            if due > self._ticks:
                self._waiting.append((due, inquiry))
                continue
            keys = inquiry.keys
            held = next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))
            inquiry.answer = NO_OFFER if self.lost else Offer(inquiry.peer or "peer", held)
