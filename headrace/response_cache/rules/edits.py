"""Changes between two texts that share their frame: words of little meaning that matter there.

Between texts that say the same in other words, prepositions and adverbs mean little. Where all else is equal, each
change must be accounted for: a preposition, an adjective that restricts, another form of a word, or a further wish
changes what is asked for. The words are English. Pure words in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from headrace.response_cache.rules.spellings import inflected, stem
from headrace.response_cache.rules.word_classes import FUNCTION_WORDS, NEGATIONS, NEUTRAL, akin, same_meaning

_MOST_WORDS = 64
"""Changed words up to which texts are aligned."""

_RELATING = frozenset(
    """
    in on at to from for by with without into onto of about over under across along through between behind against
    around before after during until since because although though if unless while when as than like up down off out
    near inside outside within per towards toward upon beyond above below but or and so
    """.split()  # noqa: SIM905
)
"""Prepositions and conjunctions."""
_ALIKE = frozenset(
    frozenset(pair.split("/"))
    for pair in """
    to/into in/into in/inside in/within at/in on/in of/in of/on about/on of/about for/of of/from at/on while/when
    during/in if/when since/because as/because around/near toward/towards onto/on upon/on through/via near/by
    though/although in/during with/by
    """.split()  # noqa: SIM905
)
"""Prepositions and conjunctions that mean the same in some places."""
_MAY_LACK = frozenset(("of", "to", "in", "on", "that", "and", "so", "if"))
"""Prepositions that one of two equal texts may lack: "on Monday", "most of my time"."""
_RESTRICTING = frozenset(
    """
    best certain different specific particular other others more current currently possible required same right
    proper various used working real easy quick simple correct available
    """.split()  # noqa: SIM905
)
"""Adjectives of little meaning that restrict the noun behind them."""
_STATES = frozenset(("still", "already", "again", "yet", "anymore", "even", "else", "alone"))
"""Adverbs that say what was before."""
_VAGUE = frozenset(
    """
    way ways method methods time times place places thing things practice practices option options idea ideas tip tips
    advice step steps information info details detail order procedure approach
    """.split()  # noqa: SIM905
)
"""Nouns that an adjective does not restrict: the best way to do it is how to do it."""
_PASSIVE = frozenset(("is", "are", "was", "were", "be", "been", "get"))


_GRAMMAR = FUNCTION_WORDS | NEGATIONS


class Edit(NamedTuple):
    """Words of two texts at one place, with the word behind each."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    behind: tuple[str, str]


def edits(
    one: Sequence[str], frame: Sequence[str], other: Sequence[str], frame_of_other: Sequence[str]
) -> list[Edit]:
    """The changes between two texts of words and their stems; none if there are too many."""
    start, least = 0, min(len(frame), len(frame_of_other))
    while start < least and frame[start] == frame_of_other[start]:
        start += 1
    end = 0
    while end < least - start and frame[-1 - end] == frame_of_other[-1 - end]:
        end += 1
    ours, theirs = frame[start : len(frame) - end], frame_of_other[start : len(frame_of_other) - end]
    if max(len(ours), len(theirs)) > _MOST_WORDS:
        return []
    found = []
    for kind, i, j, k, m in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind != "equal":
            i, j, k, m = (at + start for at in (i, j, k, m))
            behind = ("".join(one[j : j + 1]), "".join(other[m : m + 1]))
            found.append(Edit(tuple(one[i:j]), tuple(other[k:m]), behind))
    return found


def relates(changes: Sequence[Edit]) -> bool:
    """Whether a preposition or conjunction has become one that means something else, or is the only word more."""
    for ours, theirs, _ in changes:
        related = len(ours) == len(theirs) == 1 and {*ours, *theirs} <= _RELATING
        if related and frozenset((*ours, *theirs)) not in _ALIKE:
            return True
    if len(changes) == 1:
        ours, theirs, _ = changes[0]
        more = ours or theirs
        if not (ours and theirs) and len(more) == 1 and more[0] in _RELATING - _MAY_LACK:
            return True
    return False


def restricts(changes: Sequence[Edit], one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether only one text has an adjective that restricts a noun, or says what was before."""
    for change in changes:
        for words, others, behind, text in (
            (change.ours, change.theirs, change.behind[0], other),
            (change.theirs, change.ours, change.behind[1], one),
        ):
            for place, word in enumerate(words):
                following = words[place + 1] if place + 1 < len(words) else behind
                if word in _STATES and word not in text:
                    return True
                if word in ("keep", "keeps", "kept") and following.endswith("ing") and word not in text:
                    return True
                if word == "used" and following == "to" and _PASSIVE.isdisjoint((*one, *other)):
                    return True
                if word not in _RESTRICTING or word in text or not following or following in FUNCTION_WORDS:
                    continue
                if following not in _VAGUE and not any(same_meaning(word, each) for each in others):
                    return True
    return False


def reformed(changes: Sequence[Edit]) -> bool:
    """Whether a word at one place is a related one, or another of its root: the photographer, the photograph."""
    left, right = ([word for change in changes for word in change[side]] for side in (0, 1))
    for ours, theirs, _ in changes:
        if len(ours) == len(theirs) == 1 and not {*ours, *theirs} & _GRAMMAR:
            one, other = ours[0], theirs[0]
            if one in NEUTRAL and other in NEUTRAL:
                continue
            if not any(_one(one, each) for each in right) and not any(_one(other, each) for each in left):
                return True
    return False


def _one(one: str, other: str) -> bool:
    return akin(stem(one), stem(other)) or inflected(one, other)


def adds_wish(changes: Sequence[Edit]) -> bool:
    """Whether one text has a further wish: "and explain it"."""
    return any(
        not {"and", "then"}.isdisjoint(more) and any(word not in FUNCTION_WORDS for word in more)
        for change in changes
        for more, less in (change[:2], change[1::-1])
        if not less
    )
