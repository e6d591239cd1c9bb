"""What belongs to what in a text: units to numbers, what is negated, who does a thing and to whom.

Two texts with the same words differ if a word has changed what it belongs to: "20 knots in mph" and "20 mph in knots",
"he owes me" and "I owe him". Only what both texts say is compared. The words are English. Pure words in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.response_cache.rules.spellings import stem
from headrace.response_cache.rules.word_classes import (
    BEFORE_NOUNS,
    CLASSES,
    DONE,
    FUNCTION_WORDS,
    NEGATIONS,
    same_meaning,
)

Bindings = Mapping[tuple[str, str], frozenset[str]]
"""For a kind of relation and a word, the words that stand in it."""

_GOVERNING = frozenset("from for about into with without at in on over under against behind through".split())  # noqa: SIM905
_LIMITS = frozenset(("by", "to", "from", "until", "before", "after", "under", "over", "above", "below"))
_VERBS = frozenset("like likes want wants need needs tell tells know knows".split())  # noqa: SIM905
"""Verbs that mostly only ask, but have subjects and objects too."""
_DENIALS = NEGATIONS - frozenset("dont doesnt didnt cannot cant wont wouldnt couldnt shouldnt".split())  # noqa: SIM905
"""Negations that say by their place what they deny."""
_QUANTIFIERS = frozenset(("all", "every", "each", "both", "most"))
_LIMITING = frozenset(("only", "just", "even"))
_MEASURED = frozenset(("unit", "period", "currency"))
_SUBJECTS = {
    **dict.fromkeys(("i", "you", "we", "one", "im", "ive", "id", "ill"), "self"),
    **dict.fromkeys(("he", "hes"), "he"),
    **dict.fromkeys(("she", "shes"), "she"),
    **dict.fromkeys(("they", "theyre"), "they"),
}
_OBJECTS = {
    **dict.fromkeys(("me", "us", "you", "myself"), "self"),
    **dict.fromkeys(("him", "himself"), "he"),
    **dict.fromkeys(("her", "herself"), "she"),
    "them": "they",
}
_JOINING = frozenset("because when if while until unless although though before after since so".split())  # noqa: SIM905
"""Conjunctions whose two sides mean different things."""
_BETWEEN = 3
"""Words that may stand between a word and the pronoun behind it: "proud I am of her"."""


def bindings(words: Sequence[str]) -> Bindings:
    """The relations of a text's words."""
    found: dict[tuple[str, str], set[str]] = {}

    def add(kind: str, word: str, bound: str) -> None:
        found.setdefault((kind, word), set()).add(bound)

    for place, word in enumerate(words):
        if word in _JOINING and any(map(_carries, words[:place])):
            for kind, side in (("ahead", words[:place]), ("behind", words[place + 1 :])):
                for each in filter(_carries, side):
                    add(kind, word, stem(each))
        after = words[place + 1] if place + 1 < len(words) else ""
        before = words[place - 1] if place else ""
        if word[0].isdigit():
            if before in _LIMITS:
                add("limit", word, before)
            if after and after not in FUNCTION_WORDS and not after[0].isdigit():
                add("unit", word, stem(after))
        elif word in _DENIALS or word in _QUANTIFIERS:
            bound = next((each for each in words[place + 1 :] if _carries(each)), "")
            if bound:
                add("quantity" if word in _QUANTIFIERS else "denied", "", stem(bound))
        elif word in _LIMITING and after in ("the", "a", "an"):
            add("limited", word, "phrase")
        elif word in _LIMITING and before in ("the", "a", "an"):
            add("limited", word, "word")
        elif _carries(word) or word in _VERBS:
            if _governed(words, place):
                add("governed", "", stem(word))
            following = next((each for each in words[place + 1 :] if each not in BEFORE_NOUNS), "")
            if following and _carries(following):
                add("acted on", stem(word).rstrip("e"), stem(following))
            if after == "by" and (word.endswith(("ed", "en", "wn")) or word in DONE):
                agent = next((each for each in words[place + 2 :] if _carries(each)), "")
                add("subject", stem(word).rstrip("e"), stem(agent))
            if before in _SUBJECTS:
                add("subject", stem(word).rstrip("e"), _SUBJECTS[before])
            for each in words[place + 1 : place + 2 + _BETWEEN]:
                if each in _OBJECTS:
                    add("object", stem(word).rstrip("e"), _OBJECTS[each])
                if _carries(each) or each in _OBJECTS:
                    break
    return {key: frozenset(bound) for key, bound in found.items()}


def _governed(words: Sequence[str], place: int) -> bool:
    """Whether a preposition is right before a word and what belongs to it."""
    listed = False
    for each in reversed(words[:place]):
        if each in ("and", "or"):
            listed = True
        elif each not in BEFORE_NOUNS and not (listed and _carries(each)):
            return each in _GOVERNING
    return False


def _carries(word: str) -> bool:
    return word not in FUNCTION_WORDS and word not in NEGATIONS


def rebound(
    one: Bindings, words: frozenset[str], other: Bindings, others: frozenset[str], *, equal: bool
) -> bool:
    """Whether a word belongs to something else in the other text; ``words`` and ``others`` are the texts' stems.

    If their content words are ``equal``, a preposition that has changed its noun counts too: make money from a blog,
    make a blog about money.
    """
    if any(_turned(*each) for each in ((one, other), (other, one))):
        return True
    for key in one.keys() & other.keys():
        ours, theirs = one[key] - other[key], other[key] - one[key]
        kind = key[0]
        if kind == "governed" and equal and ours & others and theirs & words:
            return True
        if not ours or not theirs or one[key] & other[key] or kind in _COMPARED_APART:
            continue
        if kind in ("limit", "limited", "subject", "object"):
            return True
        if kind == "unit" and not any(_MEASURED & CLASSES.get(each, {}).keys() for each in ours | theirs):
            continue
        exchanged = ours <= others and theirs <= words
        if exchanged and not any(same_meaning(a, b) for a in ours for b in theirs):
            return True
    return False


_SELF = frozenset(("self",))
_COMPARED_APART = frozenset(("governed", "acted on", "ahead", "behind"))


def _turned(one: Bindings, other: Bindings) -> bool:
    """Whether what acts in one text is acted on in the other, or two sides of a conjunction have changed places."""
    for (kind, word), bound in one.items():
        if kind == "subject":
            for acted_on in ("acted on", "object"):
                found = other.get((acted_on, word))
                if (
                    found
                    and bound != _SELF
                    and bound <= found
                    and bound.isdisjoint(other.get((kind, word), ()))
                ):
                    return True
        if kind == "ahead" and (kind, word) in other:
            away = bound & other.get(("behind", word), frozenset())
            back = other[(kind, word)] & one.get(("behind", word), frozenset())
            if away and back and away != back:
                return True
    return False
