"""Whether two spellings are one word: an inflection, a form with another ending, or a slip of the keyboard.

A pair of words that are both real ("desert", "dessert") is no slip, and words with one long beginning ("stalactite",
"stalagmite", "grape", "grapefruit") are two words: only a known ending makes a form. Letters are dropped, doubled and
exchanged by a slip; a letter in place of another one mostly makes another word ("macro", "micro"). The words are
English. Pure words in, values out.
"""

from __future__ import annotations

from functools import lru_cache

_ENDINGS = frozenset(
    """
    s es d ed ing ings ion ions ation ations ition sion tion ption iption ication al ial ical ally ly ment ments ness
    ity ability ibility able ible ance ence ancy ency y ies i e ize iz ise is ization isation z t th ive ativ ative ous
    ful ent ant ary en um a n ib enc anc abl ibl iv
    """.split()  # noqa: SIM905 (a list of lines of strings is no better to read)
) | {""}
"""What may follow the common beginning of two forms of one word, of which the stem may have lost an "e" or "s"."""
_AGENTS = frozenset(("er", "r", "or", "ist"))
"""Endings of what acts: a form of the verb only ("invent", "inventor"), and none of what is acted on ("payee")."""
_INFLECTIONS = frozenset(
    ("", "s", "es", "d", "ed", "ing", "y", "i", "ies", "e", "en", "n", "is", "iz", "u", "our", "or")
)
"""What may follow the common beginning of two inflections of one word, or of two spellings."""
_LEAST_ROOT = 4
_LEAST_SLIP = 5
_STEMS = 16384
"""Words whose stems are kept."""


_VOWELS = frozenset("aeiouy")


@lru_cache(maxsize=_STEMS)
def stem(word: str) -> str:
    """The word without the commonest endings of English inflection; crude, but the same for both texts."""
    for ending, least in (("ing", 6), ("ies", 5), ("ed", 5), ("es", 5), ("s", 4)):
        if len(word) >= least and word.endswith(ending) and not word.endswith("ss"):
            cut = word[: -len(ending)]
            if _VOWELS.isdisjoint(cut):  # "string" has no ending
                return word
            if ending == "ies":
                return cut + "y"
            doubled = len(cut) > 3 and cut[-1] == cut[-2] != "s" and ending in ("ing", "ed")
            return cut[:-1] if doubled else cut
    return word[:-1] if len(word) > 4 and word.endswith("e") else word


_REAL = frozenset(
    frozenset(map(stem, pair.split("/")))
    for pair in """
    desert/dessert angel/angle trial/trail casual/causal martial/marital statute/statue county/country
    averse/adverse payer/payee principal/principle capital/capitol complement/compliment diary/dairy
    quiet/quite board/broad bride/bridge salve/slave bread/beard contact/contract planet/plant form/from
    lighting/lightning friend/fiend later/latter diner/dinner loose/lose sever/server sever/severe
    through/thorough through/though modem/modern course/corse corps/corpse breath/breathe cloth/clothe
    moral/morale human/humane immoral/immortal mortal/moral ration/ratio carton/cartoon planed/planned
    rapping/wrapping calvary/cavalry united/untied scared/sacred signal/single silver/sliver slip/split
    parish/perish bother/brother border/boarder batter/better coma/comma
    taping/tapping super/supper tinny/tiny latter/later biding/bidding pin/pine plane/planed reality/realty
    eminent/imminent allude/elude allusion/illusion prescribe/proscribe ingenious/ingenuous exit/exist
    costume/custom stationary/stationery universe/university
    """.split()  # noqa: SIM905
)
"""Pairs of real words, and of their stems, that a slip would make of each other."""


def one_word(one: str, other: str) -> bool:
    """Whether two different stems are forms of one word, or one is a slip of the other."""
    if frozenset((one, other)) in _REAL:
        return False
    return _forms(one, other) or _slip(one, other)


def _forms(one: str, other: str) -> bool:
    if {one + one[-1:], other + other[-1:]} & {one, other}:  # `stem` has cut a double letter
        return True
    shortest = min(len(one), len(other))
    common = next((at for at in range(shortest) if one[at] != other[at]), shortest)
    for root in range(common, _LEAST_ROOT - 1, -1):
        endings = {one[root:], other[root:]}
        acts = bool(endings & _AGENTS and endings & {"", "ing"}) and _takes_agent(one[:root])
        if acts or endings <= _ENDINGS:
            return True
        if root < common - 1:
            return False
    return False


def _takes_agent(root: str) -> bool:
    """Whether a root is no word in "ee", of which `stem` cuts one: the interviewer is not the interviewee."""
    return len(root) == _LEAST_ROOT or not root.endswith("e")


def _slip(one: str, other: str) -> bool:
    """Whether two neighbouring letters have changed places, or a letter inside is missing or doubled."""
    short, long = sorted((one, other), key=len)
    if len(short) < _LEAST_SLIP or short[0] != long[0]:
        return False
    at = next((at for at in range(len(short)) if short[at] != long[at]), len(short))
    if len(short) == len(long):
        return short[at + 1 : at + 2] + short[at : at + 1] + short[at + 2 :] == long[at:]
    return at < len(short) and short[at:] == long[at + 1 :]


def inflected(one: str, other: str) -> bool:
    """Whether two words are one in another number or tense, spelled in another way, or one is a slip of the other."""
    one, other = stem(one), stem(other)
    if one == other or one + one[-1:] == other or other + other[-1:] == one or _slip(one, other):
        return frozenset((one, other)) not in _REAL
    shortest = min(len(one), len(other))
    common = next((at for at in range(shortest) if one[at] != other[at]), shortest)
    endings = {one[common:], other[common:]}
    return endings <= _INFLECTIONS and endings != {"", "y"}
