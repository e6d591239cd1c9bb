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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from headrace.response_cache.rules import frames
from headrace.response_cache.rules.spellings import identifiers, stem, unify
from headrace.response_cache.rules.statements import (
    BOUNDS,
    MEASURES,
    Bindings,
    ask_differently,
    asked,
    bindings,
    rebound,
    statements,
)
from headrace.response_cache.rules.word_classes import (
    CLASSES,
    FUNCTION_WORDS,
    NEGATING_PREFIXES,
    NEGATIONS,
    NEUTRAL,
    OPPOSITES,
    PLURALS,
    POLITE_WORDS,
    PROPER,
    SIGN_WORDS,
    SPECIFYING,
    TIMELY_WORDS,
    one_worded,
    same_class,
    same_meaning,
)

_APOSTROPHES = re.compile("['\u2019]")
_OWNER = re.compile("['\u2019][sS]$")
_BEFORE_COMMA = re.compile(r"(?<!\w)([^\W_]+),(?! (?:and|or)\b)(?= )")
_ONE_OWNER = re.compile("(?<!\\w)([^\\W\\d_]+)['\u2019]s\\b")
_VARIABLE = re.compile(
    "(?<![\\w'\u2019.?!])(?<![.?!] )(?<!^)(?:\\d+|[b-hj-zA-HJ-Z])(?=['\u2019]s\\b|[^\\w'\u2019]|$)"
)
"""Numbers and single letters that are no word, of which the order counts."""
_DEFINITE = frozenset(("the", "my", "our", "your", "his", "her", "their", "its"))
_SEVERAL = {"children": "child", "men": "man", "women": "woman"}
_SEVERAL_OWNERS = re.compile("(?<!\\w)([^\\W\\d_]+(?<=s))['\u2019](?!\\w)")
_TOKEN = re.compile(r"\d+(?:th\b|(?:[.,:/]\d+)*)|[^\W\d_]+(?:['\u2019][^\W\d_]+)*[+#]*|[^\w\s]")
_CAPITAL_FIRST = re.compile(r"[\W\d_]*[A-Z]")
_IN_LAW = re.compile(r"\b([^\W\d_]+)[\s-]in[\s-]law(s?)\b", re.IGNORECASE)
_INNER_CAPITAL = re.compile(r"[^\W\d_]*[a-z][A-Z]")
_POINTING = re.compile(
    r"\b(?:this|these|the (?:following|above|below|attached))\b(?! (?:week|month|year|morning|evening|weekend))",
    re.IGNORECASE,
)
_PREPOSITIONS = frozenset(
    (
        *(
            "in",
            "on",
            "at",
            "for",
            "with",
            "without",
            "by",
            "during",
            "after",
            "before",
            "when",
            "if",
            "while",
            "as",
        ),
        *("to", "from", "under", "over", "because", "since", "until", "about", "within", "inside", "outside"),
    )
)
"""A phrase that begins with one may stand before or after its sentence."""
_SCALED = frozenset(("square", "cubic", "light"))
"""Before a unit, each of these makes another unit."""
_RANKS = frozenset(("second", "third", "next"))
_ASKED_FIRST = frozenset(("what", "which", "who", "whom"))
_SUPPORT = frozenset(("do", "does", "did"))
_AUXILIARIES = _SUPPORT | frozenset(
    "is are was were am be been can could will would shall should may might must have has had".split()  # noqa: SIM905
)
_ARTICLES = frozenset(("a", "an", "the"))
_IN_TURN = frozenset(
    (
        *(
            "from",
            "then",
            "first",
            "before",
            "after",
            "ratio",
            "divide",
            "divided",
            "subtract",
            "minus",
            "times",
        ),
        *("respectively", "former", "latter", "order", "than"),
    )
)
"""In a text with one of these words, the order of "a and b" counts."""
_WAYS = frozenset(
    ("way", "ways", "best", "method", "process", "procedure", "steps", "easiest", "fastest", "recipe")
)
_CAUSES = frozenset(("cause", "causes", "reason", "reasons"))
_ASKING = {
    "who": "who", "whos": "who", "whom": "who", "whose": "whose", "when": "when", "whens": "when",
    "where": "where", "wheres": "where", "why": "why", "whys": "why",
}  # fmt: skip
_MOST_COMPARED = 16
"""Unshared content words up to which two texts are compared word by word."""
_LONGEST_DEFINITION = 6
_OWN = frozenset(("my", "your", "our", "his", "her", "their"))
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
    """The analysis of a question. ``content`` are stems of its content words, in order; ``counts`` counts them, and
    ``repeated`` are those that it has more than once. ``stems`` are those of all words, ``opposites`` what would be the
    opposite of one, ``roots`` the words without a part that negates them ("disable", "seedless").

    ``numbers`` are numbers, codes and unusual symbols; ``names`` stems of capitalised words; ``sources`` and
    ``targets`` the words after "from" and "to", ``compared`` those after "than". ``asks`` is what is asked for: who,
    when, how many. ``said`` are bounds, quantifiers, tenses and persons that the text has, by kind. ``specified`` are
    classes of which a preposition introduces a member ("in French"). ``defines`` and ``instructs``: the text asks what
    something is, or how to do something. ``part`` is the part of the sentence that is asked for: what beats a flush
    (subject), what a flush beats (object). ``actor`` is what acts, ``patient`` what is acted on. ``than_last``: what a
    thing is bigger than. ``sequence`` are the words and numbers that count for the order, with "a and b" sorted,
    ``frame`` their stems; ``bag`` are stems of all but polite words, sorted; ``digits`` are the numbers in order.
    ``questions`` are the kinds of question, ``groups`` the words before a comma, ``variables`` numbers and letters,
    ``definite`` and ``owners`` the nouns that are several, ``beside`` content words with an article between at most.
    ``bound`` is what belongs to what, ``owned`` are content words with what they belong to. If the text has
    capitals where they belong, ``small`` are its words without one, and ``shouted`` those of little meaning in capitals
    ("US", "MAY"). ``timely`` and ``pointing``: the answer depends on the time of the request, or on something outside
    the text.
    """

    words: tuple[str, ...]
    content: tuple[str, ...]
    counts: Counter[str]
    repeated: frozenset[str]
    stems: frozenset[str]
    opposites: frozenset[str]
    roots: frozenset[str]
    numbers: Counter[str]
    negations: int
    names: frozenset[str]
    sources: frozenset[str]
    targets: frozenset[str]
    compared: frozenset[str]
    asks: frozenset[str]
    said: Mapping[int, frozenset[str]]
    specified: frozenset[str]
    questions: frozenset[str]
    defines: bool
    instructs: bool
    part: str
    actor: str
    than_last: bool
    sequence: tuple[str, ...]
    frame: tuple[str, ...]
    bag: tuple[str, ...]
    digits: tuple[str, ...]
    bound: Bindings
    owned: frozenset[tuple[str, str]]
    beside: frozenset[tuple[str, str]]
    groups: frozenset[str]
    variables: tuple[str, ...]
    definite: Mapping[str, bool]
    owners: Mapping[str, bool]
    patient: str
    small: frozenset[str]
    shouted: frozenset[str]
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


@dataclass(slots=True)
class _Reading:
    """The words of a text, sorted by what they are; see `Traits`."""

    words: list[str]
    content: list[str]
    spoken: list[str]
    numbers: Counter[str]
    names: set[str]
    small: set[str]
    shouted: set[str]


def _read(text: str) -> _Reading:
    read = _Reading([], [], [], identifiers(text), set(), set(), set())
    starts_sentence = True
    for token in _TOKEN.findall(text):
        if token[0].isdigit():
            read.spoken.append(token.replace(",", ""))
            read.numbers[read.spoken[-1]] += 1
            starts_sentence = False
        elif not token[0].isalpha():
            starts_sentence = token in ".?!"
        else:
            _read_word(read, token, starts_sentence)
            starts_sentence = False
    return read


def _read_word(read: _Reading, token: str, starts_sentence: bool) -> None:
    word = _plain(token)
    identifier = not token.islower() and _INNER_CAPITAL.match(token) is not None
    root = word if identifier else stem(word)
    if word in SIGN_WORDS:
        read.numbers[SIGN_WORDS[word]] += 1
    elif word not in FUNCTION_WORDS and word not in NEGATIONS:
        read.content.append(root)
        if identifier or (token[0].isupper() and not starts_sentence):
            read.names.add(root)
        elif token.islower():
            read.small.add(root)
    elif len(token) > 1 and token.isupper():
        read.shouted.add(word)
    if len(word) == 1 and read.words and _labels(word, read.words[-1]):
        read.numbers[word] += 1
    read.words.append(word)
    read.spoken.append(word)


def _analyse(text: str) -> Traits:
    text = unify(text)
    if "law" in text.lower():
        text = _IN_LAW.sub(r"\1inlaw\2", text)
    text = one_worded(text)
    read = _read(text)
    words, content, spoken, names = read.words, read.content, read.spoken, read.names
    cased = _CAPITAL_FIRST.match(text) is not None and not text.isupper()
    counts = Counter(content)
    sequence = _sequence(spoken)
    stems = frozenset(map(stem, words))
    stems |= _positives(stems)
    return Traits(
        words=tuple(words),
        content=tuple(content),
        counts=counts,
        repeated=frozenset(word for word, count in counts.items() if count > 1),
        stems=stems,
        opposites=frozenset().union(*(OPPOSITES[each] for each in stems & OPPOSITES.keys())),
        roots=frozenset(root for word in words for root in _roots(word)),
        numbers=read.numbers + Counter(_compounds(words)),
        negations=sum(word in NEGATIONS for word in words),
        names=frozenset(names) if len(names) <= _TITLE * len(words) else frozenset(),
        sources=_words_after("from", words),
        targets=_words_after("to", words),
        compared=_words_after("than", words),
        asks=_asks(words),
        said=statements(words),
        specified=_specified(words),
        questions=asked(words),
        defines=_defines(words),
        instructs="how" in words and MEASURES.keys().isdisjoint(words) and not _WAYS & set(words),
        part=_asked_part(words),
        actor=frames.actor(words),
        than_last=words[-1:] == ["than"],
        sequence=sequence,
        frame=tuple(map(stem, sequence)),
        bag=tuple(sorted(stem(each) for each in spoken if each not in POLITE_WORDS)),
        digits=tuple(each for each in spoken if each[0].isdigit()),
        bound=bindings(spoken),
        owned=frames.owned(spoken),
        beside=frames.owned(spoken, articles=True),
        groups=_groups(text) if not {"and", "or"}.isdisjoint(words) else frozenset(),
        variables=tuple(_VARIABLE.findall(text)),
        definite=_definite(words),
        owners=_owners(text),
        patient=frames.patient(words),
        small=frozenset(read.small) if cased else frozenset(),
        shouted=frozenset(read.shouted) if cased else frozenset(),
        timely=not TIMELY_WORDS.isdisjoint(words),
        pointing=_POINTING.search(text) is not None,
    )


def _plain(token: str) -> str:
    """A word in small letters without apostrophes; of an owner ("wife's") the name."""
    word = token.lower()
    if word.isalpha():
        return word
    word = _APOSTROPHES.sub("", word)
    owns = _OWNER.search(token) is not None and word not in FUNCTION_WORDS and word not in TIMELY_WORDS
    return word[:-1] if owns else word


def _labels(letter: str, before: str) -> bool:
    """Whether a single letter names something ("vitamin d"), and is no rest of a contraction ("what s", "don t")."""
    rest = letter == "t" and before[-1] == "n"
    return letter not in "ai" and not rest and before not in FUNCTION_WORDS and before not in NEGATIONS


_memoized = lru_cache(maxsize=_MEMOIZED)(_analyse)


def _groups(text: str) -> frozenset[str]:
    """The words behind which a comma stands, but for one before "and" and "or", as in a list."""
    return frozenset(_plain(word) for word in _BEFORE_COMMA.findall(text) if word.lower() not in POLITE_WORDS)


def _definite(words: Sequence[str]) -> dict[str, bool]:
    """The stems of nouns behind "the" or an owner, and whether these are several: my manager, my managers."""
    return {
        stem(word): word.endswith("s")
        for before, word, behind in zip(words, words[1:], [*words[2:], "the"], strict=False)
        if before in _DEFINITE and behind in FUNCTION_WORDS
        if word not in FUNCTION_WORDS and not word.endswith("ss")
    }


def _owners(text: str) -> dict[str, bool]:
    """The nouns that own something, and whether there are several: the child's, the children's."""
    if _APOSTROPHES.search(text) is None:
        return {}
    words = [_plain(word) for word in _ONE_OWNER.findall(text)]
    found = {stem(_SEVERAL.get(word, word)): word in _SEVERAL for word in words}
    return found | {stem(_plain(word)): True for word in _SEVERAL_OWNERS.findall(text)}


_PLURAL_OF = dict(pair.split("/") for pair in PLURALS)


def _plural(one: Collection[str], other: Collection[str]) -> bool:
    """Whether the first text has a word, and the other its plural, which means something else."""
    return any(
        _PLURAL_OF[word] in other and word not in other and _PLURAL_OF[word] not in one
        for word in _PLURAL_OF.keys() & one
    )


def said(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """What a text says, without politeness, articles, capitals and forms of numbers: its words, and its numbers."""
    found = traits(text)
    return found.sequence, tuple(sorted(found.numbers.items()))


def _one_or_several(one: Traits, other: Traits) -> bool:
    """Whether a noun is one thing in one text and several in the other: my manager, my managers."""
    return (
        any(other.definite.get(word, many) != many for word, many in one.definite.items())
        or any(other.owners.get(word, count) != count for word, count in one.owners.items())
        or _plural(one.words, other.words)
        or _plural(other.words, one.words)
    )


def _owners_swapped(one: Traits, other: Traits) -> bool:
    """Whether two nouns have changed places, as an owner and what it owns: my boss's wife, the boss of my wife."""
    return "by" not in one.stems | other.stems and (
        frames.swapped(one.owned, other.owned)
        or (one.counts == other.counts and frames.swapped(one.beside, other.beside))
    )


def compare(one: Traits, other: Traits) -> Difference:
    """Compare two questions; symmetric."""
    ours, theirs = one.counts, other.counts
    only_one, only_other = _more(ours, theirs), _more(theirs, ours)
    left, right = len(only_one), len(only_other)
    total = max(1, len(one.content) + len(other.content))
    moved = _moved(one, other)
    framed = frames.shared(one.frame, other.frame)
    changes = frames.edits(one.sequence, one.frame, other.sequence, other.frame) if framed else []
    same_order = one.bag == other.bag and not _reordered(one.sequence, other.sequence)
    if max(left, right) > _MOST_COMPARED:  # texts that differ so much are far apart
        only_one = only_other = []
    return Difference(
        unshared=(left + right) / total,
        substituted=2 * min(left, right) / total,
        moved=moved,
        length=abs(len(one.words) - len(other.words)) / max(1, len(one.words) + len(other.words)),
        numbers=one.numbers != other.numbers or (one.digits != other.digits and not same_order),
        negation=one.negations % 2 != other.negations % 2,
        opposite=_opposed(one, other),
        names=(bool(one.names - theirs.keys()) and bool(other.names - ours.keys()))
        or _renamed(one, other)
        or _renamed(other, one),
        reordered=(moved > 0 and one.bag == other.bag and not same_order)
        or (one.frame == other.frame and one.groups != other.groups)
        or (
            one.variables != other.variables
            and sorted(one.variables) == sorted(other.variables)
            and not same_order
        )
        or _one_or_several(one, other)
        or (moved > 0 and {one.part, other.part} == {"subject", "object"} and ours == theirs)
        or _exchanged(one, other)
        or frames.turned(one.actor, one.content, other.actor, other.content)
        or frames.passive(one.actor, one.patient, other.actor, other.patient)
        or _owners_swapped(one, other)
        or rebound(one.bound, one.stems, other.bound, other.stems, equal=ours == theirs)
        or frames.relates(changes),
        asked=_disjoint(one.asks, other.asks)
        or any(one.said[kind].isdisjoint(other.said[kind]) for kind in one.said.keys() & other.said.keys())
        or any(one.said.get(kind) != other.said.get(kind) for kind in BOUNDS)
        or _defined(one, other, theirs)
        or _defined(other, one, ours)
        or (framed and ask_differently(one.questions, one.words, other.questions, other.words)),
        same_class=_of_one_class(only_one, only_other)
        or _of_one_root(only_one, only_other)
        or _more_specific(one, other)
        or _more_specific(other, one),
        substitute=_substituted(only_one, only_other, one, other)
        or frames.exchanged(one.content, other.content)
        or frames.narrowed(one.content, other.content, one.words, other.words)
        or frames.restricts(changes, one.words, other.words)
        or frames.reformed(changes)
        or frames.adds_wish(changes),
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
    if not _CAUSES.isdisjoint(words):
        asked.add("why")
    asked |= {f"how {MEASURES[b]}" for a, b in pairwise(words) if a == "how" and b in MEASURES}
    return frozenset(asked)


def _compounds(words: list[str]) -> Iterator[str]:
    """Units of two words, such as watt hours and square miles, and ranks, such as the second largest."""
    for a, b in pairwise(words):
        classes = CLASSES.get(stem(b), {})
        measured = "unit" in classes or "period" in classes
        if (measured and (a in _SCALED or "unit" in CLASSES.get(stem(a), {}))) or (
            a in _RANKS and (b == "most" or (len(b) > 5 and b.endswith("est")))
        ):
            yield f"{stem(a)} {stem(b)}"


def _specified(words: list[str]) -> frozenset[str]:
    """Classes of which a word directly after a preposition is a member."""
    return frozenset(
        SPECIFYING[word] for before, word in pairwise(words) if before in _PREPOSITIONS and word in SPECIFYING
    )


def _more_specific(one: Traits, other: Traits) -> bool:
    """Whether a text specifies a member of a class of which the other text has none."""
    return bool(one.specified) and any(
        all(name not in CLASSES.get(word, {}) for word in other.content) for name in one.specified
    )


def _asked_part(words: list[str]) -> str:
    """Whether a question with who, what or which asks for the subject or the object; empty: neither is certain."""
    beginning = words[1:4]
    if words[:1] == [] or words[0] not in _ASKED_FIRST:
        return ""
    if not _SUPPORT.isdisjoint(beginning):
        return "object"
    return "subject" if _AUXILIARIES.isdisjoint(beginning) else ""


def _defines(words: list[str]) -> bool:
    """Whether a text asks what something is: "what is inflation", "what is a mortgage"."""
    asks = words[:2] in (["what", "is"], ["what", "are"]) or words[:1] == ["whats"]
    other = _WAYS | _CAUSES
    return asks and len(words) <= _LONGEST_DEFINITION and other.isdisjoint(words) and not _OWN & set(words)


def _defined(one: Traits, other: Traits, theirs: Counter[str]) -> bool:
    """Whether a text asks what something is, and the other how to do something with it, or when, where or why."""
    asks = other.instructs or any(each in other.asks for each in ("who", "when", "where", "why"))
    return one.defines and not one.asks and asks and not other.defines and theirs.keys() >= set(one.content)


def _sequence(words: list[str]) -> tuple[str, ...]:
    """The words without polite words and articles; the two in "a and b" sorted, if their order does not count."""
    kept = [word for word in words if word not in _ARTICLES and (word == "and" or word not in POLITE_WORDS)]
    if _IN_TURN.isdisjoint(kept):
        for place in range(1, len(kept) - 1):
            if kept[place] in ("and", "or") and kept[place - 1] > kept[place + 1]:
                kept[place - 1], kept[place + 1] = kept[place + 1], kept[place - 1]
    return tuple(kept)


def _reordered(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether the orders of the same words may differ in meaning.

    A phrase with a preposition may move from the end to the beginning: "what should I see in Paris".
    """
    if one == other:
        return False
    return not any(
        first[0] in _PREPOSITIONS and second == first[cut:] + first[:cut]
        for first, second in ((one, other), (other, one))
        for cut in range(1, len(first))
    )


def _renamed(one: Traits, other: Traits) -> bool:
    """Whether a word is a name in one text only: Reading and reading, the US and us, what a server MAY do."""
    if one.shouted and (other.shouted or other.small):
        unlike = one.shouted - other.shouted
        if unlike and (other.shouted or unlike & set(other.words)):
            return True
    return not (one.names & other.small) - one.small - other.names <= PROPER


def _disjoint(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether both texts say something, and nothing in common."""
    return bool(one and other and one.isdisjoint(other))


def _of_one_class(one: Collection[str], other: Collection[str]) -> bool:
    """Whether two texts have different members of a class of words, of the words that only one of them has."""
    return any(same_class(a, b) and not same_meaning(a, b) for a in one for b in other)


def _of_one_root(one: Collection[str], other: Collection[str]) -> bool:
    """Whether a word is a superlative in one text only: the largest and a large city, heavier and heaviest."""
    left, right = set(map(_degree, one)), set(map(_degree, other))
    return any(a[0] == b[0] and a[1] != b[1] and 2 in (a[1], b[1]) for a in left for b in right)


def _degree(word: str) -> tuple[str, int]:
    """The root of a stem, and whether it is compared (1) or the highest (2); what is no adjective has a root too."""
    degree = (
        2 if len(word) > 5 and word.endswith("est") else 1 if len(word) > 4 and word.endswith("er") else 0
    )
    root = word[: len(word) - (0, 2, 3)[degree]].rstrip("eyi")
    return (root[:-1] if degree and len(root) > 2 and root[-1] == root[-2] else root), degree


def _substituted(only_one: Collection[str], only_other: Collection[str], one: Traits, other: Traits) -> bool:
    """Whether texts that share their frame differ in words that nothing of the other text accounts for."""
    left = _unexplained(only_one, [word for word in other.content if word not in one.counts])
    right = _unexplained(only_other, [word for word in one.content if word not in other.counts])
    if left or right:
        left, right = frames.joined(left, one.words, other.words, right)
    if not (left or right) or not frames.shared(one.frame, other.frame):
        return False
    more, words, others = (left, one.words, other.words) if left else (right, other.words, one.words)
    return bool(left and right) or frames.narrows(more, words, others)


def _unexplained(words: Collection[str], text: Sequence[str]) -> list[str]:
    """The words that carry meaning and that no word of another text means too."""
    return [
        word for word in words if word not in NEUTRAL and not any(same_meaning(word, each) for each in text)
    ]


def _more(one: Counter[str], other: Counter[str]) -> list[str]:
    """The words that the first text has more often, each as often as that."""
    return [word for word, count in one.items() for _ in range(count - other.get(word, 0))]


def _moved(one: Traits, other: Traits) -> float:
    """Share of pairs of shared words (each once on both sides) whose order is reversed."""
    once = one.counts.keys() & other.counts.keys()
    if one.repeated or other.repeated:
        once = once - one.repeated - other.repeated
    places = {word: place for place, word in enumerate(other.content) if word in once}
    order = [places[word] for word in one.content if word in once]
    pairs = len(order) * (len(order) - 1) // 2
    if not pairs or order == sorted(order):
        return 0.0
    return sum(a > b for index, a in enumerate(order) for b in order[index + 1 :]) / pairs


def _exchanged(one: Traits, other: Traits) -> bool:
    """Whether the source of one question is the target of the other, or what is compared has changed its side."""
    away = (one.sources - other.sources) & other.targets
    back = (one.targets - other.targets) & other.sources
    than = one.compared and other.compared and one.compared.isdisjoint(other.compared)
    than = than and one.compared <= {*other.content} and other.compared <= {*one.content}
    turned = one.than_last != other.than_last and bool(one.compared or other.compared)
    return bool(away or back or than or turned or frames.contrasted(one.frame, other.frame))


def _opposed(one: Traits, other: Traits) -> bool:
    """Whether a word of one text is the opposite of a word of the other, and neither is in both."""
    if not (
        one.opposites & other.stems
        or one.roots.intersection(other.words)
        or other.roots.intersection(one.words)
    ):
        return False
    left, right = set(one.words) - set(other.words), set(other.words) - set(one.words)
    stems, others = (set(map(stem, each)) for each in (right, left))
    stems |= _positives(stems)
    if any(not OPPOSITES.get(word, frozenset()).isdisjoint(stems) for word in others | _positives(others)):
        return True
    return any(
        root in shorter
        for shorter, longer in ((left, right), (right, left))
        for word in longer
        for root in _roots(word)
    )


def _positives(stems: Collection[str]) -> set[str]:
    """The adjectives of which these stems are degrees: "fast" of "faster"."""
    return {root for root, degree in map(_degree, stems) if degree}


def _roots(word: str) -> Iterator[str]:
    """What is left of a word without a negating prefix or suffix, if that is more than three letters."""
    if word.startswith(NEGATING_PREFIXES):
        for prefix in NEGATING_PREFIXES:
            if word.startswith(prefix) and len(word) > len(prefix) + 3:
                yield word[len(prefix) :]
    if word.endswith("less") and len(word) > 7:
        yield word[:-4]
        yield f"{word[:-4]}s"
