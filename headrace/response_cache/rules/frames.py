"""What two texts have in common, their frame, and the words that differ in it; who acts in them.

In a shared frame, an answer holds for a changed question only if each changed word is accounted for: by a synonym, by a
word that carries little meaning, or by one that only names what is asked for. So the burden of proof is on the change:
a preposition, an adjective that restricts, another form of a word, or a further wish changes what is asked for.
A text that says the same in other words mostly has another frame. Pure words in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

from headrace.response_cache.rules.spellings import inflected, stem
from headrace.response_cache.rules.word_classes import (
    BEFORE_NOUNS,
    CLASSES,
    DONE,
    FUNCTION_WORDS,
    NAMING,
    NEGATIONS,
    NEUTRAL,
    NO_ACTOR,
    POLITE_WORDS,
    akin,
    same_meaning,
)

MOST_INSERTED = 2
"""Words that one text may have more than another one that is equal otherwise."""

SHARED_FRAME = 0.4
"""The share of the longer text's words that both texts have in the same order, from which they share their frame."""

CONTAINED = 0.75
"""The share of the shorter text's words from which they do, too: the longer text only says more."""

_CONTRASTS = frozenset(
    map(frozenset, (("from", "for"), ("from", "about"), ("from", "with"), ("by", "about"), ("by", "for"),
                    ("against", "for"), ("against", "with"), ("to", "about"), ("like", "about"),
                    ("with", "for"), ("on", "about"), ("on", "for"), ("with", "in"),
                    ("as", "to"), ("as", "for"), ("and", "or"),
                    ("do", "need"), ("do", "want"), ("need", "want"), ("like", "want"), ("know", "need"))),
)  # fmt: skip
"""Words of little meaning that mean different things at one place, such as a letter from, for and about a friend."""
_PARTS = frozenset(("pag", "file", "packag", "program", "tool", "person", "team", "word", "term"))
"""Stems that say of what kind a thing is, but name a part of it before "of"."""
_ADDED = frozenset(("for", "by", "against", "without"))
_BEFORE = frozenset(map(stem, BEFORE_NOUNS))
_AUXILIARIES = frozenset(
    """can could do does did will would shall should may might must cant couldnt dont doesnt didnt wont wouldnt
    shouldnt""".split()  # noqa: SIM905
)
_QUESTIONS = frozenset(("what", "which", "who", "whom", "when", "where", "why", "how"))
_LAST_AUXILIARY = 7


def shared(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two texts have so many words in the same order that they ask for the same kind of thing.

    Then what differs is what is asked about. Who says the same in other words changes its frame too.
    """
    common, short, long = _longest_common(one, other), *sorted((len(one), len(other)))
    return common >= SHARED_FRAME * long or common >= CONTAINED * short


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence.

    Each bit of ``row`` is a word of ``one``; it is 0 where the length grows (the bit-parallel method of Hyyrö).
    """
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    whole = row = (1 << len(one)) - 1
    for word in other:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & whole
    return len(one) - row.bit_count()


def contrasted(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two texts are equal but for a preposition, which one of them lacks or which means something else.

    Articles, owners and endings do not count.
    """
    ours, theirs = ([word for word in text if word not in _BEFORE] for text in (one, other))
    if len(ours) != len(theirs):
        short, long = sorted((ours, theirs), key=len)
        at = next((at for at in range(len(short)) if short[at] != long[at]), len(short))
        return long[at] in _ADDED and short[at:] == long[at + 1 :]
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    return len(differing) == 1 and frozenset(differing[0]) in _CONTRASTS


def exchanged(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether texts with these content words are equal but for words at the same places that mean different things."""
    if len(one) != len(other):
        return False
    differing = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    if not differing or len(differing) == len(one) or any(a in other or b in one for a, b in differing):
        return False
    if len(differing) == 1:
        return not _exchangeable(*differing[0])
    left, right = zip(*differing, strict=True)
    return _unexplained(left, right) and _unexplained(right, left)


def _exchangeable(one: str, other: str) -> bool:
    plain = {each for each in (one, other) if each in NEUTRAL}
    return same_meaning(one, other) or (len(plain) == 1 and {one, other} <= plain | NAMING)


def _unexplained(words: Sequence[str], others: Sequence[str]) -> bool:
    return any(word not in NEUTRAL and not any(same_meaning(word, each) for each in others) for word in words)


def narrowed(one: Sequence[str], other: Sequence[str], words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether one of two texts has the content words of the other and a few more, which narrow what it asks for.

    ``one`` and ``other`` are the content words, ``words`` and ``others`` all words.
    """
    if len(one) > len(other):
        one, other, words, others = other, one, others, words
    if not one or not 0 < len(other) - len(one) <= MOST_INSERTED:
        return False
    return narrows(_inserted(one, other), others, words)


def narrows(more: Sequence[str], words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether one of these stems, which only a text with ``words`` has, narrows what it asks for."""
    asked = ("which", "what", "how")
    after = (*words[2:], "")
    free = {
        stem(word)
        for (before, word), behind in zip(pairwise(words), after, strict=False)
        if before in asked and behind not in BEFORE_NOUNS
    }
    heads = {stem(a) for a, b in pairwise(words) if b == "of"} & _PARTS
    plain = [stem(word) for word in others if word in FUNCTION_WORDS]
    return any(
        word not in NEUTRAL
        and (word not in NAMING or word in heads)
        and word not in free
        and not any(same_meaning(word, each) for each in plain)
        for word in more
    )


def _inserted(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The words that the longer text has between those of the shorter one; none if it lacks one of these."""
    more: list[str] = []
    at = 0
    for word in other:
        if at < len(one) and word == one[at]:
            at += 1
        else:
            more.append(word)
    return more if at == len(one) else []


def joined(
    more: Sequence[str], words: Sequence[str], others: Sequence[str], less: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Without what is one word in one text and two in the other: wifi and wi-fi, a workout and to work out.

    ``more`` are stems that only a text with ``words`` has, ``less`` those that only one with ``others`` has.
    """
    left, right = list(more), list(less)
    for ours, texts, theirs in ((left, others, right), (right, words, left)):
        for a, b in pairwise(texts):
            if ours and stem(stem(a) + b) in ours:
                ours.remove(stem(stem(a) + b))
                theirs[:] = [each for each in theirs if each not in (stem(a), stem(b))]
    return left, right


def owned(words: Sequence[str], *, articles: bool = False) -> frozenset[tuple[str, str]]:
    """Content words and what they belong to, or stand beside: the boss's wife, the wife of the boss, an oil lamp.

    With ``articles``: those that stand beside each other but for an article or an owner.
    """
    content = [
        (place, word) for place, word in enumerate(words) if word not in FUNCTION_WORDS and word.isalpha()
    ]
    found = set()
    for (place, a), (after, b) in pairwise(content):
        between = words[place + 1 : after]
        if not between or (articles and BEFORE_NOUNS.issuperset(between)):
            found.add((_singular(a), _singular(b)))
        elif articles or "period" in CLASSES.get(stem(a), ()):  # a week of meals, weekly meals
            continue
        elif between[0] == "of" and BEFORE_NOUNS.issuperset(between[1:]):
            found.add((_singular(b), _singular(a)))
    return frozenset(found)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def swapped(one: frozenset[tuple[str, str]], other: frozenset[tuple[str, str]]) -> bool:
    """Whether two words have changed places: a horse race, a race horse; the boss's wife, the boss of the wife."""
    return any((b, a) in other and a != b and (b, a) not in one for a, b in one)


def patient(words: Sequence[str]) -> str:
    """What is acted on, as a passive question says it: the stem before "produced by"; else empty."""
    for place in range(2, len(words) - 1):
        done = words[place]
        if words[place + 1] == "by" and (done.endswith(("ed", "en", "wn")) or done in DONE):
            noun = words[place - 1]
            return "" if noun in FUNCTION_WORDS else stem(noun)
    return ""


def passive(one: str, acted_on: str, other: str, others: str) -> bool:
    """Whether what acts in one text (``one``, ``other``) is acted on in the other."""
    return bool((one and one == others) or (other and other == acted_on))


def actor(words: Sequence[str]) -> str:
    """Who or what acts, as a question says it: the stem of the noun behind its auxiliary, or "i"; else empty."""
    for place, word in enumerate(words[: _LAST_AUXILIARY + 1]):
        if word in _AUXILIARIES and (place == 0 or words[0] in _QUESTIONS):
            for noun in words[place + 1 : place + 3]:
                if noun in BEFORE_NOUNS:
                    continue
                after = words[place + 2 : place + 5]
                if "and" in after or "be" in after:  # two that act together, or one that is acted on
                    return ""
                known = noun in NO_ACTOR or (noun != "i" and noun in FUNCTION_WORDS) or noun in POLITE_WORDS
                return "" if known else noun if noun == "i" else stem(noun)
            return ""
    return ""


def turned(one: str, content: Sequence[str], other: str, others: Sequence[str]) -> bool:
    """Whether what acts in one text is acted on in the other: ``one`` acts in that of ``content``, ``other`` in that of
    ``others``."""
    if not one or not other or one == other:
        return False
    return _acted_on(one, others) and _acted_on(other, content)


def _acted_on(noun: str, words: Sequence[str]) -> bool:
    return noun == "i" or any(noun.rstrip("e") == each.rstrip("e") for each in words)


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
