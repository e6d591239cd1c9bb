"""Drafts that follow an earlier occurrence of the last tokens: in the same request (prompt lookup), or in past outputs
of the same tenant (suffix decoding).

```
 tokens    the cat sat on the mat . then the cat | ?        the longest suffix with an earlier occurrence
           ^^^^^^^                       ^^^^^^^
                   sat on the mat                           what followed it there is proposed
```
For prompt lookup, the text of each request is kept as a string with one character per token, and searched from its
end. A search costs about a nanosecond per token, far less than attention to it. An index of all n-grams would cost
more to build than most requests ever need.

```
 ended ──► pending outputs ──► index of the scope (tenant, salt, adapter) ──► propose
           at most CHUNK tokens at a time
```
In the index of past outputs, past occurrences vote on each next token. A proposal ends where the probability that all
of it is accepted becomes small, so a longer match makes it longer. Scopes share nothing: neither a proposal nor the
time to find it reveals another scope's text.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from headrace.core.block_keys import root_key
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request

# Tokens as a string, because a string is searched faster than a list.


def characters(tokens: Sequence[int]) -> str:
    """One character per token. Ids beyond Unicode may share a character: a wrong proposal is only rejected."""
    try:
        return "".join(map(chr, tokens))
    except (ValueError, OverflowError):
        return "".join(chr(token % (sys.maxunicode + 1)) for token in tokens)


class NgramProposer:
    """Proposes from the request's own prompt and output.

    Args:
        max_tokens: the maximum length of a proposal.
        min_n: the shortest suffix that is looked up, in tokens.
        max_n: longer matches than this are not looked for, in tokens.
    """

    name = "ngram"

    def __init__(self, max_tokens: int, min_n: int = 2, max_n: int = 16) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n ({min_n}) must be at least 1 and at most max_n ({max_n})")
        self._max_tokens = max_tokens
        self._min_n = min_n
        self._max_n = max_n
        self._confidences = tuple(matched / (matched + 1) for matched in range(max_n + max_tokens + 1))
        self._texts: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the texts of all requests."""
        return sum(map(sys.getsizeof, self._texts.values()))

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        return [self._propose(draft_row) for draft_row in draft_rows]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Drop the text of a request."""
        self._texts.pop(request.id, None)

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        tokens, name = draft_row.tokens, draft_row.request.id
        text = self._texts.pop(name, "")  # the only reference: the string grows in place
        if len(text) > len(tokens):
            text = ""  # it belongs to another request with the same id
        text += characters(tokens[len(text) :])
        self._texts[name] = text
        max_tokens = min(self._max_tokens, draft_row.max_tokens)
        position, matched = self._longest_match(text)
        if not matched or max_tokens < 1:
            return None
        run = tokens[position : position + max_tokens]
        if len(run) < max_tokens:  # the text repeats with a short period, and so does the proposal
            run = (run * (max_tokens // len(run) + 1))[:max_tokens]
        return Proposal(tuple(run), self._confidences[matched : matched + max_tokens], self.name)

    def _longest_match(self, text: str) -> tuple[int, int]:
        """The position after the newest of the longest earlier occurrences of a suffix, and its length (0: none)."""
        position, matched, longest = len(text), 0, self._max_n
        size = self._min_n
        while matched < longest and size < len(text):
            # No later occurrence is as long, so the search continues before the last one.
            found = text.rfind(text[-size:], 0, position - 1)
            if found < 0:
                break
            position, matched = found + size, size
            while matched < longest and matched < position and text[position - matched - 1] == text[~matched]:
                matched += 1
            size = matched + 1
        return position, matched


# The continuation index: past outputs as a source of proposed tokens.
#
#  log       # t h e _ c a t _ s a t # o n _ t h e _ m a t #      a ring of tokens; # closes each output
#  heads     bucket of (h, e, _) -> 18 --+                        the newest position after three such tokens
#  earlier                     18 -> 4 <-+                        the position before that one, and so on
# The three arrays of LZ77 (as in zlib's deflate) replace a suffix tree: 20 bytes a token instead of hundreds, one step
# per added token without a dictionary, and eviction by overwriting. The positions found are compared token by token.
# Those with the longest match with the context vote on the next token, as the counts of a suffix tree's node would
# (SuffixDecoding, arXiv:2411.04975). A proposal changes no answer, because proposed tokens are verified.
#
# One index belongs to one scope (tenant, model, adapter): see `ScopedIndexes`.

MIN_MATCH = 3
"""Tokens that must match before a position is compared."""

CANDIDATES = 8
"""Maximum number of positions that vote, newest first; it bounds the cost of a proposal."""

MAX_STEPS = 16
"""Maximum number of positions of a bucket examined, including those of other tokens in the same bucket."""

LENGTHS = (64, 32, 16, 8, 4)
"""Matches with the context are measured in these lengths; shorter ones count as `MIN_MATCH`."""

SAMPLE = 16
"""One in this many added tokens is proposed first, to learn how often votes are right."""

MIN_SURVIVAL = 0.1
"""A proposal ends where the probability that all of it is accepted falls below this, because more would not pay."""

SEPARATOR = 0xFFFFFFFF
"""Closes an output in the log; no token has this id."""

INITIAL_TOKENS = 1 << 12
"""Initial size of a log in tokens; it doubles as long as memory allows."""

BYTES_PER_TOKEN = 4 + 8 + 8
"""A token, its position's predecessor, and its bucket's head."""


class VotedRun(NamedTuple):
    """Tokens that may come next.

    ``probabilities[i]`` estimates the probability that ``tokens[i]`` is accepted if all tokens before it are.
    ``matched`` is the number of context tokens that the positions behind the proposal match, at least.
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    matched: int


NO_RUN = VotedRun((), (), 0)


class ContinuationIndex:
    """An index over the newest outputs of one scope.

    It starts small and doubles while memory allows. From the first output on for which it may not grow, it keeps its
    size and overwrites its oldest outputs.
    """

    def __init__(self) -> None:
        self._size = INITIAL_TOKENS
        self._log = array("I", bytes(4 * INITIAL_TOKENS))
        self._heads = array("q", [-1]) * INITIAL_TOKENS
        self._earlier = array("q", [-1]) * INITIAL_TOKENS
        self._end = 0  # positions written so far; the slot of a position is its remainder by the size
        self._accuracy = _VoteAccuracy()
        self.outputs = 0

    @property
    def nbytes(self) -> int:
        """Memory of the three arrays, the only parts that grow."""
        return self._size * BYTES_PER_TOKEN

    @property
    def tokens(self) -> int:
        """Tokens in the log, including the marks between outputs."""
        return min(self._end, self._size)

    def add(
        self, output: Sequence[int], lead: Sequence[int] = (), *, continued: bool = False, max_bytes: int
    ) -> None:
        """Add one output or a part of it; ``lead`` are the last tokens before it, of the prompt or of the last part.

        It ``continued`` if the last call added the part before. The index may use up to ``max_bytes`` for it, and never
        less than its initial size.
        """
        tokens = (*lead[-MIN_MATCH:], *output)
        # After positions have been reused, doubling would change their slots.
        while self._end <= self._size < self._end + len(tokens) + 1 and 2 * self.nbytes <= max_bytes:
            self._double()
        again = len(tokens) - len(output) + 1  # the lead, and the mark that closes the last part
        if continued and again <= self._end % self._size <= self._size - len(output):
            self._end -= again
        most = self._size // 2
        for start in range(0, len(tokens), most):
            self._write(tokens[max(0, start - MIN_MATCH) : start + most])
        self.outputs += not continued

    def _double(self) -> None:
        """Double the size; each bucket becomes two with the same positions, which are compared in any case."""
        self._log.extend(array("I", bytes(4 * self._size)))
        self._earlier.extend(array("q", [-1]) * self._size)
        self._heads.extend(self._heads)
        self._size *= 2

    def _write(self, tokens: tuple[int, ...]) -> None:
        size, log = self._size, self._log
        self._learn(tokens)
        if (self._end % size) + len(tokens) + 1 > size:  # an output never wraps, so that slices stay whole
            rest = size - self._end % size
            log[self._end % size :] = array("I", [SEPARATOR]) * rest
            self._end += rest
        first = self._end
        slot = first % size
        log[slot : slot + len(tokens) + 1] = array("I", (*tokens, SEPARATOR))
        self._end = first + len(tokens) + 1
        heads, earlier, mask = self._heads, self._earlier, size - 1
        grams = zip(tokens, tokens[1:], tokens[2:-1], strict=False)
        for position, gram in enumerate(grams, first + MIN_MATCH):
            bucket = hash(gram) & mask
            earlier[position & mask] = heads[bucket]
            heads[bucket] = position

    def _learn(self, tokens: tuple[int, ...]) -> None:
        """Record how votes on the tokens of this output would have gone, before it is in the log."""
        for at in range(MIN_MATCH + self.outputs % SAMPLE, len(tokens), SAMPLE):  # vary the positions
            past = array("I", tokens[max(0, at - LENGTHS[0]) : at])
            votes = self._votes(past)
            if votes.positions:
                leader, support = next(
                    _majorities([self._log[position : position + 1] for position in votes.positions])
                )
                if leader != SEPARATOR:
                    self._accuracy.learn(votes.matched, support, leader == tokens[at])

    def propose(self, context: Sequence[int], max_tokens: int) -> VotedRun:
        """Up to ``max_tokens`` tokens that may follow ``context``, of which the last `LENGTHS`[0] tokens count."""
        votes = self._votes(array("I", context[-LENGTHS[0] :]))
        if not votes.positions or max_tokens < 1:
            return NO_RUN
        log = self._log
        ahead = [log[position : position + max_tokens] for position in votes.positions]
        tokens: list[int] = []
        probabilities: list[float] = []
        survival, matched, estimates = 1.0, votes.matched, self._accuracy.estimates
        for token, support in _majorities(ahead):
            probability = estimates[_ROWS[matched]][support]
            survival *= probability
            if token == SEPARATOR or survival < MIN_SURVIVAL:
                break
            tokens.append(token)
            probabilities.append(probability)
            matched = min(matched + 1, LENGTHS[0])
        return VotedRun(tuple(tokens), tuple(probabilities), votes.matched)

    def _votes(self, past: array[int]) -> _Votes:
        """The slots after the longest matches with ``past``, newest first."""
        if len(past) < MIN_MATCH:
            return _NO_VOTES
        log, earlier, mask = self._log, self._earlier, self._size - 1
        oldest = max(MIN_MATCH, self._end - self._size)
        gram = past[-MIN_MATCH:]
        position = self._heads[hash(tuple(gram)) & mask]
        found: list[int] = []
        for _ in range(MAX_STEPS):
            if position < oldest:
                break
            slot = position & mask
            if log[slot - MIN_MATCH : slot] == gram:
                found.append(slot)
                if len(found) == CANDIDATES:
                    break
            position = earlier[slot]
        matched, count = MIN_MATCH, len(past)
        for length in _SHORTEST_FIRST:
            if length > count or not found:
                break
            tail = past[-length:]
            matching = [slot for slot in found if log[slot - length : slot] == tail]
            if not matching:
                break
            found, matched = matching, length
        return _Votes(tuple(found), matched)


class _Votes(NamedTuple):
    positions: tuple[int, ...]
    matched: int


_NO_VOTES = _Votes((), 0)
_SHORTEST_FIRST = LENGTHS[::-1]


def _majorities(ahead: list[array[int]]) -> Iterator[tuple[int, int]]:
    """The leading token at each index of the runs, and its support; runs with another token no longer vote."""
    at = 0
    while True:
        for ballots in zip(*ahead, strict=False):
            leader, votes = _leader(ballots)
            at += 1
            if votes < len(ballots):
                yield leader, 2 if 2 * votes >= len(ballots) else 3
                break
            yield leader, votes > 1
        else:
            return
        ahead = [run[at:] for run in ahead if run[at - 1] == leader]
        at = 0


def _leader(ballots: Sequence[int]) -> tuple[int, int]:
    """The token with most votes, and their number; of equals the first one, which is the newest."""
    first = ballots[0]
    votes = ballots.count(first)
    if 2 * votes >= len(ballots):
        return first, votes
    leader = max(dict.fromkeys(ballots), key=ballots.count)
    return leader, ballots.count(leader)


class _VoteAccuracy:
    """How often votes were right, by the length of their match with the context and by the leader's support:
    a single position; several that all agree; a majority; fewer than half.

    Each cell starts with the estimate of PPM's method C (Moffat, 1990), weighted as two observations.
    """

    def __init__(self) -> None:
        self._right = [[2.0 * prior for prior in _PRIORS] for _ in range(len(LENGTHS) + 1)]
        self._seen = [[2.0] * len(_PRIORS) for _ in range(len(LENGTHS) + 1)]
        self.estimates = [list(_PRIORS) for _ in range(len(LENGTHS) + 1)]

    def learn(self, matched: int, support: int, right: bool) -> None:
        row = _ROWS[matched]
        self._right[row][support] += right
        self._seen[row][support] += 1
        self.estimates[row][support] = self._right[row][support] / self._seen[row][support]


_PRIORS = (1 / 2, 4 / 5, 1 / 2, 1 / 4)

_ROWS = tuple(sum(matched < length for length in LENGTHS) for matched in range(LENGTHS[0] + 1))
"""The row of each match length; a longer one counts as the longest."""


# Continuation indexes of all scopes, one each, within one memory limit.
#
# A scope separates what must not mix: tenant and salt, engine, adapter. Scopes share nothing, not even the buckets of a
# table. So neither a proposal nor its duration reveals another scope's outputs. Speculative decoding calls `propose`;
# finished answers are added with `add`.


class ProposalCounts(NamedTuple):
    """Sizes of the indexes, and totals since the start."""

    scopes: int
    tokens: int
    nbytes: int
    outputs: int
    evicted_scopes: int


class ScopedIndexes:
    """Indexes of at most ``max_bytes`` together; with less than one smallest index, nothing is stored.

    A new scope replaces the least recently used one. A scope only grows into free memory; without it, it overwrites
    its own oldest outputs.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._scopes: OrderedDict[bytes, ContinuationIndex] = OrderedDict()
        self._nbytes = 0
        self._evicted = 0

    def add(
        self, scope: bytes, output: Sequence[int], lead: Sequence[int] = (), *, continued: bool = False
    ) -> None:
        """Add the tokens of a finished answer or the next part of them, as `ContinuationIndex.add`."""
        index = self._scopes.get(scope)
        if index is None:
            index = self._open(scope)
            if index is None:
                return
        self._scopes.move_to_end(scope)
        before = index.nbytes
        index.add(output, lead, continued=continued, max_bytes=self._max_bytes - self._nbytes + before)
        self._nbytes += index.nbytes - before

    def propose(self, scope: bytes, context: Sequence[int], max_tokens: int) -> VotedRun:
        """The proposed tokens after ``context``, from outputs of this scope only."""
        index = self._scopes.get(scope)
        if index is None:
            return NO_RUN
        self._scopes.move_to_end(scope)
        return index.propose(context, max_tokens)

    def forget(self, prefix: bytes = b"") -> None:
        """Drop the outputs of all scopes that begin with ``prefix``."""
        for scope in [scope for scope in self._scopes if scope.startswith(prefix)]:
            self._nbytes -= self._scopes.pop(scope).nbytes

    def counts(self) -> ProposalCounts:
        """Sizes and totals."""
        indexes = self._scopes.values()
        return ProposalCounts(
            len(indexes),
            sum(index.tokens for index in indexes),
            self._nbytes,
            sum(index.outputs for index in indexes),
            self._evicted,
        )

    def _open(self, scope: bytes) -> ContinuationIndex | None:
        needed = INITIAL_TOKENS * BYTES_PER_TOKEN
        if needed > self._max_bytes:
            return None
        while self._nbytes + needed > self._max_bytes:
            _, dropped = self._scopes.popitem(last=False)
            self._nbytes -= dropped.nbytes
            self._evicted += 1
        index = self._scopes[scope] = ContinuationIndex()
        self._nbytes += index.nbytes
        return index


LEAD = 8
"""Number of tokens at the end of the prompt that are indexed with an output."""

CHUNK = 128  # see docs/decisions/speculative-decoding.md#search-of-texts-for-drafts
"""Maximum number of tokens indexed at a time, which bounds the time added to a step."""

MAX_PENDING = 1024
"""Maximum number of outputs that wait for indexing; the oldest are dropped."""


class _PendingOutput(NamedTuple):
    """Tokens of an output to index after ``lead``; ``continued``: the output's tokens before them are indexed."""

    scope: bytes
    output: list[int]
    lead: tuple[int, ...]
    continued: bool = False


class SuffixProposer:
    """Proposes from past outputs of the request's scope.

    Args:
        max_tokens: the maximum length of a proposal.
        max_bytes: memory of the indexes of all scopes; the least recently used scope is evicted.
    """

    name = "suffix"

    def __init__(self, max_tokens: int, max_bytes: int = 64 << 20) -> None:
        self._max_tokens = max_tokens
        self._indexes = ScopedIndexes(max_bytes)
        self._pending: deque[_PendingOutput] = deque(maxlen=MAX_PENDING)
        self._forgotten: deque[bytes] = deque()
        self.counts: ProposalCounts = self._indexes.counts()
        """Sizes and totals after the last change; may be read from another thread."""

    @property
    def nbytes(self) -> int:
        """Memory of the indexes."""
        return self.counts.nbytes

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        if self._pending or self._forgotten:
            self._index_pending()
        return [self._propose(draft_row) for draft_row in draft_rows]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Queue the output for indexing, unless the request forbids it."""
        output = tokens[len(request.tokens) :]
        if request.indexed and output:
            self._pending.append(_PendingOutput(scope_of(request), output, request.tokens[-LEAD:]))

    def forget(self, tenant: str | None = None) -> None:
        """Drop the outputs of ``tenant``, or all, before the next proposal.

        It may be called from another thread.
        """
        self._forgotten.append(b"" if tenant is None else _digest(tenant))

    def _index_pending(self) -> None:
        while self._forgotten:
            prefix = self._forgotten.popleft()
            self._indexes.forget(prefix)
            kept = [each for each in self._pending if not each.scope.startswith(prefix)]
            self._pending = deque(kept, maxlen=MAX_PENDING)
        left = CHUNK
        while self._pending and left > 0:
            scope, output, lead, continued = self._pending.popleft()
            part, rest = output[:left], output[left:]
            self._indexes.add(scope, part, lead, continued=continued)
            left -= len(part)
            if rest:
                self._pending.appendleft(_PendingOutput(scope, rest, (*lead, *part)[-LEAD:], continued=True))
        self.counts = self._indexes.counts()

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        request = draft_row.request
        scope = _scope(request.tenant, request.salt, request.adapter)
        found = self._indexes.propose(scope, draft_row.tokens, min(self._max_tokens, draft_row.max_tokens))
        return Proposal(found.tokens, found.probabilities, self.name) if found.tokens else None


def scope_of(request: Request) -> bytes:
    """The scope within which outputs are proposed: the tenant, the cache salt and the adapter."""
    return _scope(request.tenant, request.salt, request.adapter)


@lru_cache(maxsize=1024)
def _scope(tenant: str, salt: str, adapter: str) -> bytes:
    return _digest(tenant) + root_key(salt, adapter)


def _digest(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()
