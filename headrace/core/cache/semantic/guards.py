"""Guards: differences between questions that an encoder places close together, although their answers differ.

An encoder places "turn it on" beside "turn it off", and "fly from A to B" beside "fly from B to A". `traits` analyses
a question once, `compare` compares two analyses, and `veto` names a difference that forbids serving a cached
response, however high its score: in numbers, negation, names, order, what is asked for, or a word that no synonym
explains. Other differences are evidence for the score. The word lists are English; in other languages numbers, symbols,
names, order and a single differing word still guard. Pure text in, values out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from headrace.core.cache.semantic.opposites import (
    BOUNDS,
    EXCLUSIVE,
    FUNCTION_WORDS,
    NEGATING_PREFIXES,
    NEGATIONS,
    NUMBER_WORDS,
    OPPOSITES,
    POLITE_WORDS,
    TIMELY_WORDS,
    stem,
)
from headrace.core.cache.semantic.word_classes import NEUTRAL, same_class, same_meaning

_APOSTROPHES = re.compile("['\u2019]")
_TOKEN = re.compile(r"\d+(?:[.,:/]\d+)*|[^\W\d_]+(?:['\u2019][^\W\d_]+)*[+#]*|[^\w\s]")
_BETWEEN = re.compile(r"(?:\d\w?|\)|\b[^\W\d_])\s*([-*/]+)\s*(?=[\d(.$\u20ac\u00a3-]|[^\W\d_]\b)")
_SIGN = re.compile(r"(?<![\w)])-(?=[$\u20ac\u00a3]?\.?\d)")
"""Between two numbers or single letters, or before a number, a plain symbol is arithmetic."""
_HALF_DAY = re.compile(r"(?<![^\W\d_])([ap])\.\s?m\b\.?", re.IGNORECASE)
_CODE = re.compile(r"(?<!\w)(?=\w*\d)(?=\w*[^\W\d_])[\w.-]*\w|[^\W\d_][+#]+")
"""Letters with digits (M604n, iphone-6s), and C++ or C#. Only the first letter of a word is a beginning: from every
letter of a long word, the search would take quadratic time."""
_PLAIN_SYMBOLS = frozenset(".,;:!?'\"()[]{}-_/\\`*\u2019\u2018\u201c\u201d\u2013\u2014\u2026")
_POINTING = re.compile(
    r"\b(?:this|these|the (?:following|above|below|attached))\b(?! (?:week|month|year|morning|evening|weekend))",
    re.IGNORECASE,
)
_ASKING = {
    "who": "who", "whos": "who", "whom": "who", "whose": "who", "when": "when", "whens": "when",
    "where": "where", "wheres": "where", "why": "why", "whys": "why",
}  # fmt: skip
_MEASURES = frozenset(
    (
        *("many", "much", "long", "old", "far", "tall", "often", "fast", "high"),
        *("big", "heavy", "deep", "wide", "large", "soon", "hot", "cold"),
    )
)
_MOST_COMPARED = 16
"""Unshared content words up to which two texts are compared word by word."""
_MEMOIZED = 16384
_MAX_MEMOIZED_CHARACTERS = 4096
_TITLE = 0.6
"""If more than this share of its words is capitalised, a question is a title or in capitals, and its capitals mean
nothing."""


class Veto(StrEnum):
    """A difference that forbids serving a cached response."""

    NUMBERS = "numbers"
    NEGATION = "negation"
    OPPOSITE = "opposite"
    NAMES = "names"
    ORDER = "order"
    ASKED = "asked"
    CLASS = "class"
    SUBSTITUTE = "substitute"


@dataclass(frozen=True, slots=True)
class Traits:
    """The analysis of a question. ``content`` are stems of its content words, in order.

    ``numbers`` are numbers, codes and unusual symbols; ``names`` stems of capitalised words; ``sources`` and
    ``targets`` the words after "from" and "to", ``compared`` those after "than". ``asks`` is what is asked for: who,
    when, how many. ``said`` are the bounds, quantifiers, tenses and persons that the text has, by kind. ``timely`` and
    ``pointing`` say that the answer depends on the time of the request, or on something outside the text.
    """

    words: tuple[str, ...]
    content: tuple[str, ...]
    numbers: Counter[str]
    negations: int
    names: frozenset[str]
    sources: frozenset[str]
    targets: frozenset[str]
    compared: frozenset[str]
    asks: frozenset[str]
    said: tuple[frozenset[str], ...]
    timely: bool
    pointing: bool


class Difference(NamedTuple):
    """The differences between two questions, each part 0 if there is none; shares are of the content words of both."""

    unshared: float
    substituted: float
    moved: float
    length: float
    numbers: bool
    negation: bool
    opposite: bool
    names: bool
    reordered: bool
    asked: bool
    same_class: bool
    substitute: bool


def traits(text: str) -> Traits:
    """Analyse a question; recent results are memoized, except for huge texts."""
    return _memoized(text) if len(text) <= _MAX_MEMOIZED_CHARACTERS else _analyse(text)


def _analyse(text: str) -> Traits:
    text = _HALF_DAY.sub(r"\1m", text)
    words: list[str] = []
    names: set[str] = set()
    numbers = Counter(code.lower() for code in _CODE.findall(text))
    numbers.update(_BETWEEN.findall(text) + _SIGN.findall(text))
    starts_sentence = True
    for token in _TOKEN.findall(text):
        if token[0].isdigit():
            numbers[token.replace(",", "")] += 1
            starts_sentence = False
        elif not token[0].isalpha():
            if token not in _PLAIN_SYMBOLS:
                numbers[token] += 1
            starts_sentence = token in ".?!"
        else:
            word = _APOSTROPHES.sub("", token.lower())
            words.append(word)
            if word in NUMBER_WORDS:
                numbers[NUMBER_WORDS[word]] += 1
            elif token[0].isupper() and not starts_sentence and word not in FUNCTION_WORDS:
                names.add(stem(word))
            starts_sentence = False
    empty = FUNCTION_WORDS | NEGATIONS | NUMBER_WORDS.keys()
    return Traits(
        words=tuple(words),
        content=tuple(stem(word) for word in words if word not in empty),
        numbers=numbers,
        negations=sum(word in NEGATIONS for word in words),
        names=frozenset(names) if len(names) <= _TITLE * len(words) else frozenset(),
        sources=_words_after("from", words),
        targets=_words_after("to", words),
        compared=_words_after("than", words),
        asks=_asks(words),
        said=tuple(_said(words, forms) for forms in EXCLUSIVE),
        timely=not TIMELY_WORDS.isdisjoint(words),
        pointing=_POINTING.search(text) is not None,
    )


_memoized = lru_cache(maxsize=_MEMOIZED)(_analyse)


def compare(one: Traits, other: Traits) -> Difference:
    """Compare two questions; symmetric."""
    ours, theirs = Counter(one.content), Counter(other.content)
    left, right = (ours - theirs).total(), (theirs - ours).total()
    total = max(1, ours.total() + theirs.total())
    moved = _moved(one.content, other.content)
    only_one, only_other = list(ours - theirs), list(theirs - ours)
    if max(len(only_one), len(only_other)) > _MOST_COMPARED:  # texts that differ so much are far apart
        only_one = only_other = []
    return Difference(
        unshared=(left + right) / total,
        substituted=2 * min(left, right) / total,
        moved=moved,
        length=abs(len(one.words) - len(other.words)) / max(1, len(one.words) + len(other.words)),
        numbers=one.numbers != other.numbers,
        negation=one.negations % 2 != other.negations % 2,
        opposite=_opposed(one, other),
        names=bool(one.names - theirs.keys()) and bool(other.names - ours.keys()),
        reordered=(moved > 0 and _word_counts(one) == _word_counts(other)) or _exchanged(one, other),
        asked=_disjoint(one.asks, other.asks)
        or any(map(_disjoint, one.said, other.said))
        or one.said[BOUNDS] != other.said[BOUNDS],
        same_class=_of_one_class(only_one, only_other),
        substitute=_one_substituted(only_one, only_other, one.content, other.content),
    )


def veto(difference: Difference) -> Veto | None:
    """The first reason not to serve a response across this difference, if there is one."""
    if difference.numbers:
        return Veto.NUMBERS
    if difference.negation:
        return Veto.NEGATION
    if difference.opposite:
        return Veto.OPPOSITE
    if difference.names:
        return Veto.NAMES
    if difference.reordered:
        return Veto.ORDER
    if difference.asked:
        return Veto.ASKED
    if difference.same_class:
        return Veto.CLASS
    if difference.substitute:
        return Veto.SUBSTITUTE
    return None


def _words_after(preposition: str, words: list[str]) -> frozenset[str]:
    """Stems of the first content words after a preposition, at most three words away."""
    found = set()
    for place, word in enumerate(words):
        if word == preposition:
            following = (stem(w) for w in words[place + 1 : place + 4] if w not in FUNCTION_WORDS)
            found.add(next(following, ""))
    return frozenset(found - {""})


def _asks(words: list[str]) -> frozenset[str]:
    """Who, when, where and why; what comes after "how" if it asks for a measure."""
    asked = {_ASKING[word] for word in words if word in _ASKING}
    asked |= {f"how {b}" for a, b in pairwise(words) if a == "how" and b in _MEASURES}
    return frozenset(asked)


def _said(words: list[str], forms: Mapping[str, str]) -> frozenset[str]:
    """What a text says of one kind; a form has one or two words."""
    pairs = (f"{a} {b}" for a, b in pairwise(words))
    return frozenset(forms[each] for each in (*words, *pairs) if each in forms)


def _disjoint(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether both texts say something, and nothing in common."""
    return bool(one and other and one.isdisjoint(other))


def _of_one_class(one: Collection[str], other: Collection[str]) -> bool:
    """Whether two texts have different members of a class of words, of the words that only one of them has."""
    return any(same_class(a, b) and not same_meaning(a, b) for a in one for b in other)


def _one_substituted(
    one: Collection[str], other: Collection[str], whole: Sequence[str], whole_other: Sequence[str]
) -> bool:
    """Whether two texts are equal but for one content word on each side, which do not mean the same."""
    left, right = _unexplained(one, whole_other), _unexplained(other, whole)
    return len(left) == 1 and len(right) == 1


def _unexplained(words: Collection[str], text: Sequence[str]) -> list[str]:
    """The words that carry meaning and that no word of another text means too."""
    return [
        word for word in words if word not in NEUTRAL and not any(same_meaning(word, each) for each in text)
    ]


def _moved(one: tuple[str, ...], other: tuple[str, ...]) -> float:
    """Share of pairs of shared words (each once on both sides) whose order is reversed."""
    places = {word: place for place, word in enumerate(other) if other.count(word) == 1}
    order = [places[word] for word in one if word in places and one.count(word) == 1]
    pairs = len(order) * (len(order) - 1) // 2
    swapped = sum(a > b for index, a in enumerate(order) for b in order[index + 1 :])
    return swapped / pairs if pairs else 0.0


def _word_counts(question: Traits) -> Counter[str]:
    return Counter(word for word in question.words if word not in POLITE_WORDS)


def _exchanged(one: Traits, other: Traits) -> bool:
    """Whether the source of one question is the target of the other, or what is compared has changed its side."""
    away = (one.sources - other.sources) & other.targets
    back = (one.targets - other.targets) & other.sources
    than = one.compared and other.compared and one.compared.isdisjoint(other.compared)
    return bool(
        away or back or (than and one.compared <= {*other.content} and other.compared <= {*one.content})
    )


def _opposed(one: Traits, other: Traits) -> bool:
    left, right = set(one.words) - set(other.words), set(other.words) - set(one.words)
    stems = {stem(word) for word in right}
    if any(not OPPOSITES.get(stem(word), frozenset()).isdisjoint(stems) for word in left):
        return True
    return any(
        prefix + word in longer
        for shorter, longer in ((left, right), (right, left))
        for word in shorter
        if len(word) > 3
        for prefix in NEGATING_PREFIXES
    )
