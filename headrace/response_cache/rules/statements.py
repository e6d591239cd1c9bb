"""What a text says: of which only one thing can hold, what it asks for, and what belongs to what in it.

`statements` finds them in the words of a text, by kind; `guards` declines if two texts say different things of one
kind: bounds, quantifiers, tenses, persons, modality, times, directions. They ask for different things if only one asks
why, when, where or who, or if one asks how to do something and the other whether; "when" and "where" inside of a
sentence are no questions.

`bindings` finds what units, negations, subjects and objects belong to. Two texts with the same words differ if a word
has changed what it belongs to: "20 knots in mph" and "20 mph in knots", "he owes me" and "I owe him". Only what both
texts say is compared. The words are English. Pure words in, values out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from headrace.response_cache.rules.spellings import one_word, stem
from headrace.response_cache.rules.word_classes import (
    BEFORE_NOUNS,
    CLASSES,
    DONE,
    FUNCTION_WORDS,
    NEGATIONS,
    same_meaning,
)


def _forms(**kinds: str) -> dict[str, str]:
    return {form: kind for kind, text in kinds.items() for form in text.split("/")}


EXCLUSIVE = (
    _forms(
        only="only/solely/exclusively/just one",
        least="at least/minimum of/no less/or more/not less",
        most="at most/up to/no more/maximum of/or less/or fewer/not more",
        above="more than/over/above/greater than/exceeding",
        below="less than/under/below/fewer than",
        exact="exactly/precisely",
    ),
    _forms(difference="<difference>/distinguish/compare/versus/vs/apart"),
    _forms(all="all/every/each/everyone/everybody/everything/both", some="some/any/several/someone/somebody"),
    _forms(all="all/every/each/both", several="several/multiple", one="<one>"),
    _forms(
        all="all/every/each/both/entire/whole/everything",
        many="a lot/lots/plenty/many of/most of/many people/most people/<most>",
        few="a few/a little/a bit/a couple/few of/very few/few people/hardly any/<few>/some",
    ),
    _forms(ask="<ask>", tell="<tell>"),
    _forms(count="<count>", list="<list>"),
    _forms(
        except_for="<but>/except/other than/besides/excluding/apart from",
        such="such as/including/for example",
    ),
    _forms(
        always="always/every time",
        ever="ever",
        often="often/usually/frequently/generally/normally/typically",
        sometimes="sometimes/occasionally",
        rarely="rarely/seldom/hardly ever",
    ),
    _forms(past="did/was/were/had/<perfect>", future="will/shall/gonna"),
    _forms(past="did/had/<perfect>", advice="should/ought"),
    _forms(past="<past>", supposed="<would>"),
    _forms(past="<past>/<perfect>", present="<present>"),
    _forms(
        mine="my/mine/myself",
        his="his/him/he/himself",
        her="her/hers/she/herself",
        their="their/theirs/they/them",
        our="our/ours/us/we",
    ),
    _forms(i="i/im/ive/ill", he="he/hes", she="she/shes", they="they/theyre", we="we"),
    _forms(
        what="<what>", who="who/whom", when="when", where="where", how="<how>", why="why", whether="<whether>"
    ),
    _forms(who="<then who>", when="<then when>", where="<then where>", how="<then how>", why="<then why>"),
    _forms(
        may="<may>/allowed/permitted/optional/might",
        must="<must>/must/mandatory/compulsory/obligatory/required/obliged to",
        should="<should>/ought/advisable/recommended",
        does="<does>",
        will="<will>",
        fact="<fact>",
    ),
    _forms(equal="<equal>", greater="<greater>", smaller="<smaller>"),
    _forms(this="<this>", next="<next>", previous="<previous>"),
    _forms(
        before="before/prior/until/till",
        meanwhile="while/during/meanwhile",
        after="after/once/following/subsequent/afterwards/since",
    ),
    _forms(into="into/onto/toward/towards/<to>", out="out of/off/away from/from"),
    _forms(past="made", present="makes"),
    _forms(valid="valid", expired="expired/outdated"),
    _forms(single="one way/single ticket", round="round trip/return ticket/return trip/return flight"),
)
"""Words and pairs of words by what they mean: two texts that say different things of one kind differ.

A form in angle brackets is what `_marks` finds by a rule: one as a quantity, the tense of the first verb, the direction
of a comparison."""

_SAYING = {
    form: tuple((kind, forms[form]) for kind, forms in enumerate(EXCLUSIVE) if form in forms)
    for form in {form for forms in EXCLUSIVE for form in forms}
}
"""For each form of `EXCLUSIVE` the kinds that it speaks of, and what it says."""
BOUNDS = (0, 1)
"""The kinds in `EXCLUSIVE` of which neither text may say more than the other."""

MEASURES = {
    **{word: word for word in ("many", "much", "long", "old", "far", "tall", "often", "fast", "high", "big")},
    **{word: word for word in ("heavy", "deep", "wide", "soon", "hot", "cold")},
    "large": "big",
    "quick": "fast",
}
"""What "how" may ask for, by one word for each measure."""

_ALL = frozenset("all every everything everyone any anything anyone nothing none".split())  # noqa: SIM905
"""In a sentence with one of these words, "but" behind it makes an exception."""
_TALKING = frozenset(("you", "i", "we", "there"))
"""Behind these words a question means the same with "can" and "do"."""
_NO_COUNT = frozenset("which this that the another no any every each some good better best".split())  # noqa: SIM905
"""After these words "one" is no quantity."""
_PRESENT = frozenset(("is", "are", "am", "do", "does", "isnt", "arent", "doesnt", "dont", "whats", "whos"))
_PAST = frozenset(("was", "were", "did", "wasnt", "werent", "didnt"))
_QUESTIONS = frozenset(("who", "when", "where", "how", "why", "what", "which"))
_ASKING = frozenset(("whats", "whos"))
_SUPPORTING = frozenset("do does did can could should will would must".split())  # noqa: SIM905
_CIRCUMSTANCES = frozenset(
    "time date day month year hour place location reason cause need mean stand for".split()  # noqa: SIM905
)
_FINITE = _PRESENT | _PAST
_RELATIVE = {
    **dict.fromkeys(("this", "current"), "<this>"),
    **dict.fromkeys(("next", "coming", "upcoming"), "<next>"),
    **dict.fromkeys(("last", "previous", "past"), "<previous>"),
}
_CALENDAR = frozenset(("period", "weekday", "month", "season", "daytime", "holiday"))


def statements(words: list[str]) -> Mapping[int, frozenset[str]]:
    """What a text says, by the kinds of which it says something; a form has one or two words, or is a mark."""
    found: dict[int, set[str]] = {}
    for each in _SAYING.keys() & {*words, *_pairs(words), *_marks(words)}:
        for kind, meaning in _SAYING[each]:
            found.setdefault(kind, set()).add(meaning)
    return {kind: frozenset(found[kind]) for kind in sorted(found)}


def _pairs(words: list[str]) -> list[str]:
    return [f"{a} {b}" for a, b in pairwise(words)]


def _last(words: list[str], word: str) -> int:
    """The place of the last such word, 0 without one."""
    return next((place for place in range(len(words) - 1, 0, -1) if words[place] == word), 0)


def _is_plural(word: str) -> bool:
    return len(word) > 3 and word.endswith("s") and not word.endswith("ss") and word not in FUNCTION_WORDS


def _obliges(words: list[str]) -> bool:
    return not {"have to", "has to"}.isdisjoint(_pairs(words))


def _marks(words: list[str]) -> Iterator[str]:
    """The forms in angle brackets of `EXCLUSIVE`."""
    yield from _tenses(words)
    if (
        not {"would", "might"}.isdisjoint(words[:3])
        and words[:1] != ["would"]
        and not {"like", "you"} & set(words[:5])
    ):
        yield "<would>"
    for place, word in enumerate(words[:-1]):
        counts = word == "one" and (place == 0 or words[place - 1] not in _NO_COUNT)
        if counts and (words[place + 1] == "of" or words[place + 1] not in FUNCTION_WORDS):
            yield "<one>"
        if (
            word in ("ask", "tell")
            and words[place + 1] not in ("me", "us", "if")
            and words[place - 1 : place] != ["i"]
        ):
            yield f"<{word}>"
        if word in _RELATIVE and not _CALENDAR.isdisjoint(CLASSES.get(stem(words[place + 1]), ())):
            yield _RELATIVE[word]
    yield from (f"<then {a}>" for a, b in pairwise(words) if b == "to" and a in _QUESTIONS)
    if _asks_whether(words):
        yield "<whether>"
    if _asks_for_a_thing(words):
        yield "<what>"
    if any(a == "how" and b not in MEASURES and b != "come" for a, b in pairwise(words)):
        yield "<how>"
    yield from _modalities(words)
    if not _ALL.isdisjoint(words) and not _ALL.isdisjoint(words[: _last(words, "but")]):
        yield "<but>"
    if any(
        word[:3] == "dif" and (word[:6] == "differ" or one_word(stem(word), "differenc")) for word in words
    ):
        yield "<difference>"
    if "how many" in _pairs(words):
        yield "<count>"
    elif words[:1] in (["which"], ["what"]) and words[1:2] and _is_plural(words[1]):
        yield "<list>"
    for amount in ("most", "few"):
        if amount in words[:2]:
            yield f"<{amount}>"
    if "from" in words and "to" in words:
        yield "<to>"
    if "than" in words:
        yield "<smaller>" if "less" in words or "fewer" in words else "<greater>"
    elif words.count("as") > 1:
        yield "<equal>"


def _modalities(words: list[str]) -> Iterator[str]:
    """Whether a text asks what is allowed, necessary, advisable or usual, what will be, or what was a fact."""
    if words[:1] in (["can"], ["may"], ["could"]) or words[:3] == ["is", "it", "possible"]:
        yield "<may>"
    elif words[:1] == ["must"] or (words[:1] != ["how"] and _obliges(words[:6])):
        yield "<must>"
    elif words[:1] in (["do"], ["does"]) and "need to" in _pairs(words[:6]):
        yield from ("<must>", "<should>")
    elif words[:1] == ["should"]:
        yield "<should>"
    elif words[1:2] and words[1] not in _TALKING:
        if words[0] in ("do", "does"):
            yield "<does>"
        elif words[0] == "will":
            yield "<will>"
    if words[:2] in (["will", "i"], ["will", "we"], ["will", "there"]):
        yield "<will>"
    elif words[:1] in (["did"], ["was"], ["were"]):
        yield "<fact>"


def _asks_whether(words: list[str]) -> bool:
    """Whether a text is answered with yes or no, and is no polite form of another question."""
    begins = words[:1] and words[0] in _FINITE - _ASKING and words[1:2] not in (["there"], ["it"])
    return bool(begins) and _QUESTIONS.isdisjoint(words[:4])


def _asks_for_a_thing(words: list[str]) -> bool:
    """Whether a question asks which thing is used for an action, and not when, where or what to do."""
    begins = words[:1] == ["what"] and words[1:2] and words[1] in _SUPPORTING
    return bool(begins) and "do" not in words[2:] and _CIRCUMSTANCES.isdisjoint(words)


def _tenses(words: list[str]) -> Iterator[str]:
    """The tense of the first verb."""
    finite = next((word for word in words if word in _FINITE), "")
    beginning = [finite] if words[:1] != ["i"] else []
    if not _PAST.isdisjoint(beginning) or words[1:4] == ["used", "to", "be"]:
        yield "<past>"
    elif words[:1] in (["has"], ["have"], ["had"]) or (
        words[:1] != ["i"] and words[1:2] in (["has"], ["have"], ["had"])
    ):
        yield "<perfect>"
    elif not _PRESENT.isdisjoint(beginning):
        yield "<present>"


_WORDS = {
    "why": "why", "whys": "why", "when": "when", "whens": "when", "where": "where", "wheres": "where",
    "who": "who", "whos": "who", "whom": "who", "whose": "who", "how": "how", "hows": "how",
    "what": "what", "whats": "what", "which": "what",
}  # fmt: skip
_LEADING = frozenset(
    """
    tell me us know wonder wondering explain show ask find out can could you would do i to please and understand see say
    want need like help curious sure am im about on of remember hi hello so ok just exactly idea learn have any is it
    there was not dont no at in for from by since until then
    """.split()  # noqa: SIM905
)
"""Words that may stand before a question word that asks."""
_AUXILIARIES = frozenset(
    """
    do does did is are was were am can could will would shall should may might must has have had dont doesnt didnt
    isnt arent wasnt werent cant couldnt wont wouldnt shouldnt hasnt havent hadnt
    """.split()  # noqa: SIM905
)
_REQUESTING = frozenset(("can", "could", "will", "would"))
_ACTIONS = frozenset(
    """
    tell explain help give show list recommend suggest write translate describe make find name teach summarize summarise
    check define book send set play turn order cancel remind draft create add remove change update transfer share look
    let say do read correct proofread please recap compare call text pay schedule buy plan
    """.split()  # noqa: SIM905
)
"""What an assistant is asked to do."""
_WANTING = frozenset(("tell", "me", "know", "wonder", "wondering", "see", "check", "ask", "sure", "us"))
_WAYS = frozenset(("way", "ways", "method", "process", "procedure", "steps"))
_EXPLAINED = {
    "why": frozenset(
        ("cause", "causes", "caused", "reason", "reasons", "because", "makes", "made", "explain", "purpose")
    ),
    "when": frozenset(
        """
        date dates day time times year month hour hours season schedule deadline century week expiration expire expires
        """.split()  # noqa: SIM905
    ),
    "where": frozenset(
        """
        place places location locate located situated find nearest near closest close nearby address spot site stand
        map lies lie whereabouts track
        """.split()  # noqa: SIM905
    ),
    "who": frozenset(("person", "people", "name", "man", "woman", "company", "anyone", "someone")),
}
"""Words that ask for the same as a question word."""
_AGENTS = ("er", "or", "ist", "ian")


def asked(words: Sequence[str]) -> frozenset[str]:
    """What a text asks for."""
    return frozenset(_asked(words))


def _asked(words: Sequence[str]) -> Iterator[str]:
    found = False
    for place, word in enumerate(words):
        kind = _WORDS.get(word)
        if kind is None:
            continue
        opens = all(each in _LEADING for each in words[:place])
        ends = place == len(words) - 1
        follows = words[place + 1] if not ends else ""
        if kind == "what":
            if opens and not found:
                found = True
                yield "how" if _WAYS & set(words[place + 1 : place + 5]) else "what"
        elif kind == "how" and follows not in FUNCTION_WORDS and follows not in MEASURES:
            found = True  # how safe it is, whether it is safe
        elif opens or ends or kind in ("why", "how") or (follows in _AUXILIARIES and kind != "who"):
            found = True
            yield kind
    if found:
        return
    if "whether" in words or any(b == "if" and a in _WANTING for a, b in pairwise(words)):
        yield "whether"
    elif words and words[0] in _AUXILIARIES and not _requests(words):
        yield "how" if words[0] in ("is", "are") and _WAYS & set(words[1:6]) else "whether"


def _requests(words: Sequence[str]) -> bool:
    """Whether "can you" asks for an action and not whether it is possible: "can you tell me", "can you descale it"."""
    if words[0] not in _REQUESTING or words[1:2] != ["you"]:
        return False
    return words[0] in ("could", "would") or any(word in _ACTIONS for word in words[2:5])


def ask_differently(
    one: frozenset[str], words: Sequence[str], other: frozenset[str], others: Sequence[str]
) -> bool:
    """Whether two texts that share their frame ask for different things."""
    for kinds, theirs, text in ((one, other, others), (other, one, words)):
        for kind in kinds - theirs:
            if kind in _EXPLAINED:
                if not _EXPLAINED[kind].isdisjoint(text):
                    continue
                if kind == "who" and any(len(word) > 4 and word.endswith(_AGENTS) for word in text):
                    continue
                return True
            if kind in ("how", "what") and theirs == {"whether"}:
                return True
    return False


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
