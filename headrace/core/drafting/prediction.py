"""Predicted outputs: the text of the OpenAI field ``prediction`` as a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.drafting.suffix import characters
from headrace.core.request import Request

# A pointer into a known text that the output probably repeats; after an edit it finds its position again.
#
#  known text   def area ( self , width , height ) :          the pointer: the token expected next
#  output       def area ( self , w ,                         w differs: it may replace width, or come before it, or
#                                     ^ height ) :            the text may continue elsewhere. The "," decides
# After a mismatch the text may continue at several positions. The likeliest one is proposed, and the next output tokens
# decide between them. If none of them matches, the pointer moves to where the longest suffix of the output occurs in
# the text; of equally long matches, to the one nearest to the old pointer, preferably ahead of it. A proposal is always
# a slice of the text.

MAX_MATCH = 16
"""Matches longer than this many tokens count as this long."""

MAX_AHEAD, MAX_BEHIND = 6, 2
"""Maximum number of occurrences of the last two tokens that are compared, ahead of the pointer and behind it."""

NEAR_TOKENS, ADJACENT_TOKENS = 48, 2
"""How far ahead of the pointer a single matching token is a candidate, and how far it is a likely one."""

CERTAIN_MATCH = 3
"""A match of this many tokens is likelier than a candidate near the old pointer."""

MAX_GUESSES = 4
"""After more mismatched tokens than this in a row, nothing is proposed."""

MAX_COMPARED = 8
"""After a mismatch, up to this many new tokens are compared one by one; of more, only the last two are searched."""

INITIAL_MATCH = 8
"""Assumed match length before the first token has been compared."""


class Continuation(NamedTuple):
    """The position where the output continues in the text, and how many tokens before it match (0: a guess)."""

    position: int
    matched: int


class KnownText:
    """A pointer into ``text``, moved by the tokens of an output."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = tuple(text)
        self._searched = ""  # the text with one character per token, made at the first search
        self._position = 0
        self._matched = INITIAL_MATCH
        self._alternatives: list[int] = []  # other positions that match the tokens since the last mismatch
        self._unmatched = 0  # mismatched tokens in a row
        self.seen = 0  # tokens of the output so far

    @property
    def nbytes(self) -> int:
        """Estimated memory of the text and its characters."""
        return len(self.text) * (8 + (4 if self._searched else 0))

    def advance(self, tokens: list[int], start: int) -> Continuation | None:
        """Advance over the new output tokens; the output begins at ``start`` of ``tokens``.

        None if there is nothing to propose.
        """
        end, self.seen = start + self.seen, len(tokens) - start
        while end < len(tokens):
            if not self._alternatives and (count := self._matching(tokens, end)):
                self._position += count
                self._matched = min(MAX_MATCH, self._matched + count)
                self._unmatched = 0
                end += count
            elif self._decide(tokens, start, end + 1):
                end += 1
            elif len(tokens) - end > MAX_COMPARED:
                self._skip_to_end(tokens, start, len(tokens) - end)
                break
            else:
                end += 1
                self._search(tokens, start, end)
        if self._unmatched > MAX_GUESSES or self._position >= len(self.text):
            return None
        return Continuation(self._position, self._matched)

    def _matching(self, tokens: list[int], end: int) -> int:
        """How many tokens from ``end`` on match the text at the pointer."""
        new = tokens[end:]
        expected = self.text[self._position : self._position + len(new)]
        if expected == tuple(new):
            return len(new)
        pairs = enumerate(zip(new, expected, strict=False))
        return next((at for at, (token, other) in pairs if token != other), len(expected))

    def _decide(self, tokens: list[int], start: int, end: int) -> bool:
        """Keep the candidates that match the last of ``tokens[:end]``; False if none does."""
        token, text = tokens[end - 1], self.text
        matching = [
            position + 1
            for position in (self._position, *self._alternatives)
            if text[position : position + 1] == (token,)
        ]
        if not matching:
            return False
        if len(matching) > 1:
            lengths = [self._match_length(tokens, start, end, position) for position in matching]
            if max(lengths) >= CERTAIN_MATCH:
                matching.insert(0, matching.pop(lengths.index(max(lengths))))
        self._position, *self._alternatives = matching
        self._matched = min(MAX_MATCH, self._matched + 1)
        self._unmatched = 0
        return True

    def _skip_to_end(self, tokens: list[int], start: int, count: int) -> None:
        """Skip ``count`` tokens. Nothing is proposed unless the last two of them occur in the text."""
        self._position = min(len(self.text), self._position + count - 1)
        found = self._longest_match(tokens, start, len(tokens))
        if found is None:
            self._unmatched, self._alternatives = MAX_GUESSES + 1, []
        else:
            self._set_candidates(found, tokens[-1])

    def _search(self, tokens: list[int], start: int, end: int) -> None:
        """Find the positions where the text may continue after ``tokens[:end]``."""
        self._set_candidates(
            self._longest_match(tokens, start, end) if end - start > 1 else None, tokens[end - 1]
        )

    def _set_candidates(self, found: Continuation | None, token: int) -> None:
        """Set the candidate positions after the mismatch of ``token``, the likeliest first.

        ``found`` is the longest match of the output's suffix in the text, if there is one.
        """
        long = found is not None and found.matched >= CERTAIN_MATCH
        self._matched = found.matched if long and found is not None else 0
        self._unmatched = 0 if found is not None else self._unmatched + 1
        positions = [found.position] if long and found is not None else []
        position = self._position
        near = self.text[position : position + NEAR_TOKENS]
        skipped = near.index(token) if token in near else NEAR_TOKENS
        if skipped < ADJACENT_TOKENS:  # the output omits a few tokens of the text
            positions.append(position + skipped + 1)
        positions += (position + 1, position)  # the token replaces one, or is an insertion
        if found is not None:
            positions.append(found.position)
        if ADJACENT_TOKENS <= skipped < NEAR_TOKENS:
            positions.append(position + skipped + 1)
        self._position, *self._alternatives = dict.fromkeys(
            each for each in positions if each <= len(self.text)
        )

    def _longest_match(self, tokens: list[int], start: int, end: int) -> Continuation | None:
        """Where the longest suffix of ``tokens[start:end]``, of at least two tokens, occurs in the text."""
        best = Continuation(0, 0)
        for position in self._occurrences(characters(tokens[end - 2 : end])):
            matched = self._match_length(tokens, start, end, position)
            if matched > best.matched:
                best = Continuation(position, matched)
        return best if best.matched else None

    def _occurrences(self, pair: str) -> list[int]:
        """The positions after the nearest occurrences of two tokens, those from the pointer on first.

        A search in a string costs less than an index of all pairs, which most texts need once or never.
        """
        if not self._searched:
            self._searched = characters(self.text)
        text, found = self._searched, list[int]()
        at = max(0, self._position - 2)
        while len(found) < MAX_AHEAD and (at := text.find(pair, at)) >= 0:
            found.append(at + 2)
            at += 1
        end = max(0, self._position - 1)
        for _ in range(MAX_BEHIND):
            at = text.rfind(pair, 0, end)
            if at < 0:
                break
            found.append(at + 2)
            end = at + 1
        return found

    def _match_length(self, tokens: list[int], start: int, end: int, position: int) -> int:
        """How many tokens before ``position`` match the end of ``tokens[start:end]``."""
        text, matched, limit = self.text, 0, min(MAX_MATCH, position, end - start)
        while matched < limit and text[position - matched - 1] == tokens[end - matched - 1]:
            matched += 1
        return matched


class PredictionProposer:
    """Proposes the text that the client predicts (`Request.prediction`), and finds its position again after each edit.

    ``max_tokens`` is the maximum length of a proposal.
    """

    name = "prediction"

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._texts: dict[str, KnownText] = {}
        self._confidences = tuple(
            (2 * matched + 1) / (2 * matched + 2) for matched in range(MAX_MATCH + max_tokens + 1)
        )

    @property
    def nbytes(self) -> int:
        """Memory of the texts of all requests."""
        return sum(text.nbytes for text in self._texts.values())

    def propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        """As `core.drafting.proposal.Proposer.propose`."""
        return [self._propose(draft_row) for draft_row in draft_rows]

    def ended(self, request: Request, tokens: list[int]) -> None:
        """Drop the text of a request."""
        self._texts.pop(request.id, None)

    def _text(self, request: Request) -> tuple[int, ...]:
        return request.prediction

    def _propose(self, draft_row: DraftRow) -> Proposal | None:
        text = self._text(draft_row.request)
        if not text:
            return None
        start = len(draft_row.request.tokens)
        known = self._texts.get(draft_row.request.id)
        if known is None or known.seen > len(draft_row.tokens) - start:
            known = self._texts[draft_row.request.id] = KnownText(text)
        found = known.advance(draft_row.tokens, start)
        return (
            None if found is None else self._slice(text, found, min(self._max_tokens, draft_row.max_tokens))
        )

    def _slice(self, text: tuple[int, ...], found: Continuation, max_tokens: int) -> Proposal | None:
        tokens = text[found.position : found.position + max_tokens]
        if not tokens:
            return None
        return Proposal(tokens, self._confidences[found.matched : found.matched + len(tokens)], self.name)


# A cached answer as a draft. It may not be served, because its request was only similar, but it is often accepted.


class CachedAnswerProposer(PredictionProposer):
    """Proposes the cached answer that the lookup found (`Request.cached_answer`)."""

    name = "cached"

    def _text(self, request: Request) -> tuple[int, ...]:
        return request.cached_answer
