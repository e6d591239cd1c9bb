"""Orders of requests: the rank of each in the queue, and the order of a batch job whose requests are all known.

A queue order policy has one method, `rank`; the lowest rank is served first. A request gets its rank once, at
arrival. Where the rank is a time, waiting counts by itself: a request that came a second earlier is a second ahead,
so no request starves. ``number`` counts arrivals and makes every rank unique.

`order_job` orders a job by a global prefix tree, so that each prefix is computed once:

```
 prompts            tree                          order
 A B x              A ─┬─ B ─┬─ x   (short)       C D, C E      the group that decodes most per token of prefill
 C D                   │     └─ y   (long)        A B y, A B x  then the next; within it the same again
 A z                   └─ z                       A z
 A B y              C ─┬─ D
 C E                   └─ E
```
The requests of a group follow each other. Its prefix is found while it is in memory, and is released when the last of
them has started, instead of being evicted and computed again. Besides the running requests, only the path from the
root to the present group must stay in memory, however large the job is. Groups with much decoding per token of
prefill go first. So the prefill of later groups shares its steps with many decode rows (BatchLLM, Zheng et al.,
2024). The tree is that of the sorted prompts, in levels of ``grain`` bytes: finer prefixes do not change the order. It
knows no tokens: prompts are bytes, of token ids or of text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Protocol

from headrace.core.request import Request
from headrace.core.sequence import Rank

AGEING_SECONDS = 10.0
"""Seconds by which one step of ``priority`` moves a request ahead."""

PATIENCE = 4.0
"""Seconds of waiting that outweigh one second of predicted work, with `ShortestFirst`."""


class OrderPolicy(Protocol):
    """Ranks a request when it arrives: a tuple of numbers that ends in ``number``."""

    def rank(self, request: Request, number: int) -> Rank: ...


def ask_rank(policy: OrderPolicy, request: Request, number: int) -> Rank:
    """The rank that a policy gives a request, checked so that it compares with any other rank.

    Raises:
        ValueError: the policy returned no such rank. What the policy itself raises passes through.
    """
    rank = policy.rank(request, number)
    numbers = type(rank) is tuple and all(isinstance(each, int | float) for each in rank)
    if not numbers or rank[-1:] != (number,) or any(each != each for each in rank):  # NaN is not even itself
        raise ValueError(f"{rank!r} is not a tuple of numbers that ends in {number}")
    return rank


class FirstComeFirstServed:
    """By arrival alone."""

    def rank(self, request: Request, number: int) -> Rank:
        return (number,)


class ByPriority:
    """By ``priority`` (lower sooner) whatever the wait, then by arrival."""

    def rank(self, request: Request, number: int) -> Rank:
        return (request.priority, number)


class ShortestFirst:
    """By predicted work and age; ``seconds`` predicts how long a request takes alone (its output length is a guess).

    ``patience`` returns how many seconds of waiting outweigh one second of work; with 0 the order is by age.
    """

    def __init__(
        self, seconds: Callable[[Request], float], patience: Callable[[], float] = lambda: PATIENCE
    ) -> None:
        self._seconds, self._patience = seconds, patience

    def rank(self, request: Request, number: int) -> Rank:
        age = request.arrived + request.priority * AGEING_SECONDS
        patience = self._patience()
        return (age + patience * self._seconds(request) if patience else age, number)


TOKEN_BYTES = array("i").itemsize


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Token ids as bytes, `TOKEN_BYTES` each; common prefixes of the bytes are those of the tokens."""
    return array("i", tokens).tobytes()


def order_job(prompts: Many[bytes], expected_outputs: Many[float], grain: int) -> list[int]:
    """The order in which to submit the requests of a job.

    Args:
        prompts: the prompt of each request, as `token_bytes` or as text.
        expected_outputs: how much each decodes, in any unit.
        grain: bytes of a level of the tree; for tokens, those of a block.

    Returns:
        Indices into ``prompts``, each once. Equal prompts keep their order.
    """
    by_prefix = sorted(range(len(prompts)), key=prompts.__getitem__)
    path = [_Group(0)]
    for position, index in enumerate(by_prefix):
        prompt = prompts[index]
        following = by_prefix[position + 1 : position + 2]
        shared = _common_length(prompt, prompts[following[0]], grain) if following else 0
        if shared > path[-1].depth:
            path.append(_Group(shared))
        path[-1].add(len(prompt), expected_outputs[index], [index])
        while path[-1].depth > shared:
            done = path.pop()
            if path[-1].depth < shared:
                path.append(_Group(shared))
            path[-1].add(done.depth, done.decode, done.order(), done.prefill)
    return path[0].order()


class _Group:
    """Requests that share their first ``depth`` bytes, with the sums of their prefill below it and of their
    decoding.
    """

    __slots__ = ("_members", "decode", "depth", "prefill")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.prefill = 0
        self.decode = 0.0
        self._members: list[tuple[float, int, list[int]]] = []

    def add(self, end: int, decode: float, order: list[int], below: int = 0) -> None:
        """Add a request, or a group, that shares this prefix and continues to ``end``; ``below`` is prefilled under
        it.
        """
        prefill = end - self.depth + below
        self.prefill += prefill
        self.decode += decode
        self._members.append((-decode / max(1, prefill), min(order), order))

    def order(self) -> list[int]:
        """The requests of the group; members that decode most per byte of prefill come first."""
        return [index for _, _, order in sorted(self._members) for index in order]


def _common_length(left: bytes, right: bytes, grain: int) -> int:
    """Bytes of the longest common prefix, in whole grains."""
    low, high = 0, min(len(left), len(right)) // grain
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * grain : middle * grain] == right[low * grain : middle * grain]:
            low = middle
        else:
            high = middle - 1
    return low * grain
