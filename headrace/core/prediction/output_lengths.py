"""Predicts answer lengths from those of earlier answers: quantiles by tenant, adapter and ``max_tokens``.

```
 a request's key     tenant, adapter, class  ->  adapter, class  ->  class  ->  all  ->  prior
 its distribution    the observations of its key, and the next coarser distribution with weight BACK_OFF
```
The class is the power of two of ``max_tokens``: a request that allows 64 tokens has another purpose than one that
allows 4096. Each key is mixed with the coarser one instead of being replaced by it. So there is one distribution per
request, and its prediction for an answer that has produced ``given`` tokens can only grow with ``given``.

Lengths are counted in buckets an eighth of their power of two wide. The weight of older observations decays, so that
drift is followed. Answers that reached their limit are counted separately: a request of the same class with another
limit would have reached that one.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate, pairwise

from headrace.core.request import Request

DECAY_OBSERVATIONS = 1000
"""Number of observations of a key after which an older one has lost 63 % of its weight."""

BACK_OFF = 8.0  # see docs/decisions/scheduling.md#predicted-output-lengths
"""Weight of the coarser key, in observations."""

MAX_KEYS = 512
"""Maximum number of keys; the one whose last observation is the oldest is evicted."""

PRIOR_TOKENS = 256
"""Assumed mean before any answer has ended: the order of magnitude of a chat answer in public traces."""

RESCALE = 1e9
"""When the newest weight of a key exceeds this, all are divided by it, so that floats stay exact."""

LONGEST = (1 << 24) - 1
"""Longer lengths than this count as this one."""


def _bucket(tokens: int) -> int:
    """The bucket of a length of at least 1: single tokens up to 15, then eight per power of two."""
    shift = max(0, tokens.bit_length() - 4)
    return (shift << 3) + (tokens >> shift) - 1


def _shortest(bucket: int) -> int:
    """The smallest length in a bucket."""
    shift = max(0, (bucket + 1 >> 3) - 1)
    return bucket + 1 - (shift << 3) << shift


_Key = tuple[str | int, ...]

BUCKETS = _bucket(LONGEST) + 1
EDGES = [_shortest(bucket) - 1 for bucket in range(BUCKETS + 1)]
"""Bucket ``i`` holds the lengths above ``EDGES[i]`` up to ``EDGES[i + 1]``."""

WIDTHS = [high - low for low, high in pairwise(EDGES)]


def _prior() -> list[float]:
    """Mass per bucket of a Lomax distribution of shape 2: a long answer is likely to continue for as long again."""
    survival = [(1 + edge / PRIOR_TOKENS) ** -2 for edge in EDGES]
    return [*(high - low for high, low in pairwise(survival)), survival[-1]]


PRIOR = _prior()


def prior_tokens(limit: float) -> float:
    """The mean length, by the prior alone, of an answer of at most ``limit`` tokens."""
    return PRIOR_TOKENS / (1 + PRIOR_TOKENS / limit)


class _Lengths:
    """Weighted counts per bucket of one key, and the distribution computed from them on demand.

    ``counts`` has one more entry than there are buckets: answers that reached their limit. ``weight`` is that of the
    newest observation, which grows instead of the old ones shrinking. ``falling[i]`` is minus the probability of more
    than ``EDGES[i]`` tokens. It is negated so that it ascends for `bisect`, and summed from the tail so that a rare
    long answer keeps its digits. ``area[i]`` is the integral of that probability from ``EDGES[i]`` up.
    """

    __slots__ = (
        "_base",
        "_due",
        "_refreshed",
        "_total",
        "_weight",
        "area",
        "coarser",
        "counts",
        "falling",
        "key",
        "mass",
    )

    def __init__(self, key: _Key, coarser: _Lengths | None) -> None:
        self.key = key
        self.coarser = coarser
        self.counts = [0.0] * (BUCKETS + 1)
        self._total = 0.0
        self._weight = 1.0
        self._due = 0.0
        self._refreshed = -1
        self._base: list[float] = []
        self.mass: list[float] = []
        self.falling = array("d")
        self.area = array("d")

    def add(self, bucket: int) -> None:
        """Count one observation, and decay the weight of all earlier ones."""
        self._weight *= 1 + 1 / DECAY_OBSERVATIONS
        self.counts[bucket] += self._weight
        self._total += self._weight
        if self._weight > RESCALE:
            self.counts = [count / self._weight for count in self.counts]
            self._total /= self._weight
            self._due /= self._weight
            self._weight = 1.0

    def refresh(self, revision: int) -> None:
        """Bring the distribution up to date, if there are observations since the last call.

        It is recomputed when a sixteenth of the observed weight has been added, or the coarser one was recomputed. So
        the work per observation stays a few operations.
        """
        if revision == self._refreshed:
            return
        self._refreshed = revision
        base = PRIOR
        if self.coarser is not None:
            self.coarser.refresh(revision)
            base = self.coarser.mass
        if self._total < self._due and base is self._base:
            return
        self._base = base
        seen = self._total / self._weight
        self._due = self._total + self._weight * max(1.0, seen / 16)
        own, borrowed = 1 / (self._weight * (seen + BACK_OFF)), BACK_OFF / (seen + BACK_OFF)
        self.mass = [count * own + share * borrowed for count, share in zip(self.counts, base, strict=True)]
        beyond = list(accumulate(reversed(self.mass)))  # from the top edge down to no token at all
        self.falling = array("d", [-share for share in reversed(beyond)])
        strips = [
            (low + high) / 2 * width
            for (low, high), width in zip(pairwise(beyond), reversed(WIDTHS), strict=True)
        ]
        self.area = array("d", [*accumulate(strips, initial=0.0)][::-1])

    def beyond(self, tokens: int) -> float:
        """The probability of more than ``tokens`` tokens."""
        if tokens <= 0:
            return -self.falling[0]
        i = _bucket(tokens)
        here = self.falling[i]
        return -here - (self.falling[i + 1] - here) * (tokens - EDGES[i]) / WIDTHS[i]

    def area_beyond(self, tokens: int) -> float:
        """The integral of `beyond` from ``tokens`` up."""
        if tokens <= 0:
            return self.area[0]
        i = _bucket(tokens)
        return self.area[i + 1] + (EDGES[i + 1] - tokens) * (self.beyond(tokens) - self.falling[i + 1]) / 2

    def length_exceeded_with(self, share: float) -> float:
        """The length that an answer exceeds with probability ``share``; infinite if more answers reach their limit."""
        i = bisect_left(self.falling, -share)
        if i > BUCKETS:
            return math.inf
        if i == 0:
            return 0.0
        before = self.falling[i - 1]
        return EDGES[i - 1] + WIDTHS[i - 1] * (-share - before) / (self.falling[i] - before)


class LengthPredictor:
    """Predicts the output tokens of requests from those that have ended.

    Every prediction lies between 1 (and ``min_tokens``) and the request's limit. The limit is the smaller of
    ``max_tokens`` and what ``max_model_len`` leaves after the prompt. A request that ignores the end of text reaches
    its limit.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._keys: OrderedDict[_Key, _Lengths] = OrderedDict()
        self._without_key = _Lengths((), None)
        self._revision = 0

    def limit(self, request: Request) -> int:
        """The maximum number of output tokens."""
        room = max(1, self._max_model_len - len(request.tokens))
        max_tokens = request.params.max_tokens
        return min(room, LONGEST) if max_tokens is None else min(room, max_tokens, LONGEST)

    def observe(self, request: Request, output_tokens: int) -> None:
        """Observe an answer that ended by itself or at its limit; cancelled and failed requests must not be observed.

        Answers that only their limit could end are ignored.
        """
        if _ends_at_limit(request):
            return
        reached = output_tokens >= self.limit(request)
        bucket = BUCKETS if reached else _bucket(max(1, output_tokens))
        lengths: _Lengths | None = self._keys.get(_finest(request)) or self._with_keys(request)
        while lengths is not None:
            lengths.add(bucket)
            self._keys.move_to_end(lengths.key)  # after its finer keys, so that it is not evicted before them
            lengths = lengths.coarser
        self._revision += 1
        while len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def quantile(self, request: Request, q: float, given: int = 0) -> int:
        """The total number of output tokens that the answer does not exceed with probability ``q``.

        Args:
            request: the request of the answer.
            q: at least 0 and below 1.
            given: the tokens that it has produced already without ending.
        """
        limit = self.limit(request)
        least = max(given + 1, min(request.params.min_tokens, limit))
        if least >= limit or _ends_at_limit(request):
            return limit
        lengths = self._lengths(request)
        length = lengths.length_exceeded_with(lengths.beyond(given) * (1 - q))
        return limit if length >= limit else max(least, math.ceil(length - 1e-9))

    def expected(self, request: Request, given: int = 0) -> float:
        """The mean of the total output tokens, if ``given`` have been produced without ending."""
        limit = self.limit(request)
        least = max(given + 1, min(request.params.min_tokens, limit))
        if least >= limit or _ends_at_limit(request):
            return float(limit)
        lengths = self._lengths(request)
        further = (lengths.area_beyond(given) - lengths.area_beyond(limit)) / lengths.beyond(given)
        # Half a token: the integral places a length of n anywhere in the unit below n.
        return min(float(limit), max(float(least), given + further + 0.5))

    def _with_keys(self, request: Request) -> _Lengths:
        """The lengths of a request's key; adds it and its coarser keys where they are missing."""
        lengths = self._keys.setdefault((), self._without_key)
        for key in _keys(request)[1:]:
            lengths = self._keys.get(key) or _Lengths(key, lengths)
            self._keys[key] = lengths
        return lengths

    def _lengths(self, request: Request) -> _Lengths:
        lengths = self._keys.get(_finest(request))
        if lengths is None:
            known = (self._keys.get(key) for key in reversed(_keys(request)))
            lengths = next((each for each in known if each is not None), self._without_key)
        lengths.refresh(self._revision)
        return lengths


def _ends_at_limit(request: Request) -> bool:
    """Whether only the limit can end the answer."""
    params = request.params
    return params.ignore_eos and not params.stop and not params.stop_token_ids


def _finest(request: Request) -> _Key:
    max_tokens = request.params.max_tokens
    return 0 if max_tokens is None else max_tokens.bit_length(), request.adapter, request.tenant


def _keys(request: Request) -> list[_Key]:
    """The keys of a request, coarsest first."""
    finest = _finest(request)
    return [finest[:parts] for parts in range(len(finest) + 1)]
