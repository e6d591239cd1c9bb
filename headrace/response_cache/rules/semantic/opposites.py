"""English word lists of the guards: function words, negations, opposites, words of time, persons and bounds.

Contains only data, and a crude stemming that matches inflections. Another language needs another such file.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS = _words(
    """
    a an the of in on at to for from by with about into over and or but if then than as is are was were be been being
    am do does did doing done have has had having will would shall should can could may might must i you he she it we
    they me him her us them my your his its our their this that these those there here so too very just please what
    which who whom whose when where why how some any one also let lets get got im ive id ill whats hows wheres whos
    thats theres tell know want need like way s t m re ve ll d
    """
)
POLITE_WORDS = _words("please hi hello hey thanks thank kindly so well ok okay and")
NEGATIONS = _words(
    """
    no not never without cannot neither nor none nothing nobody nowhere hardly barely except unless dont doesnt didnt
    isnt arent wasnt werent wont wouldnt cant couldnt shouldnt hasnt havent hadnt aint
    """
)
SIGN_WORDS = {"plus": "+", "minus": "-", "twice": "2"}
"""Words that count as numbers, beside those that `numerals` writes as digits.

"One", "first", "second", "third" and "half" do not: a question mostly means the same without them (a second card,
third parties, half an hour). If two questions differ in such words, they count as opposites."""

TIMELY_WORDS = _words(
    "today todays tonight tomorrow yesterday currently latest recent recently upcoming nowadays"
)
NEGATING_PREFIXES = ("un", "in", "im", "dis", "de", "non", "ir", "il", "mis", "anti")

_OPPOSITES = _words(
    """
    on/off enable/disable activate/deactivate open/close buy/sell before/after with/without first/last minimum/maximum
    min/max gain/lose win/lose import/export in/out up/down more/less most/least advantage/disadvantage pros/cons
    pro/con hot/cold left/right old/new best/worst good/bad better/worse credit/debit short/long shortest/longest
    high/low highest/lowest higher/lower lend/borrow send/receive give/receive given/received add/remove start/stop
    start/end begin/end accept/decline accept/reject male/female men/women man/woman boy/girl lock/unlock login/logout
    deposit/withdraw deposit/withdrawal freeze/unfreeze pass/fail true/false cheap/expensive strong/weak
    strongest/weakest legal/illegal positive/negative increase/decrease increase/reduce above/below inside/outside
    early/late earliest/latest love/hate like/dislike connect/disconnect install/uninstall subscribe/unsubscribe
    upgrade/downgrade allow/block allow/deny pause/resume hide/show push/pull mute/unmute raise/lower big/small
    large/small safe/dangerous easy/hard easy/difficult fast/slow full/empty hire/fire husband/wife father/mother
    brother/sister son/daughter day/night summer/winter north/south east/west black/white input/output encrypt/decrypt
    encode/decode upload/download sunrise/sunset morning/evening arrive/leave arrival/departure incoming/outgoing
    oldest/newest youngest/oldest attack/defend am/pm noon/midnight add/subtract multiply/divide
    second/third half/third half/quarter third/quarter in/outside within/outside succeed/fail success/failure
    short/detailed brief/detailed brief/long simplified/traditional single/double
    """
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
    _forms(all="all/every/each/everyone/everybody/everything/both", some="some/any/several/someone/somebody"),
    _forms(all="all/every/each/both", one="<one>"),
    _forms(most="most people/most of/many people/many of", few="few people/few of/hardly any/very few"),
    _forms(past="did/was/were/had/<perfect>", future="will/shall/gonna"),
    _forms(past="did/had/<perfect>", advice="should/ought"),
    _forms(past="<past>/<perfect>", present="<present>"),
    _forms(
        mine="my/mine/myself",
        his="his/him/he/himself",
        her="her/hers/she/herself",
        their="their/theirs/they/them",
        our="our/ours/us/we",
    ),
    _forms(i="i/im/ive/ill", he="he/hes", she="she/shes", they="they/theyre", we="we"),
    _forms(how="<how>", why="why"),
    _forms(may="<may>/allowed to", must="<must>"),
    _forms(equal="<equal>", greater="<greater>", smaller="<smaller>"),
)
"""Words and pairs of words by what they mean: two texts that say different things of one kind differ.

A form in angle brackets is what `guards` finds by a rule: one as a quantity, the tense of the first verb, the direction
of a comparison."""

BOUNDS = 0
"""The kind in `EXCLUSIVE` of which neither text may say more than the other."""


def stem(word: str) -> str:
    """The word without the commonest endings of English inflection; crude, but the same for both texts."""
    for ending, least in (("ing", 6), ("ies", 5), ("ed", 5), ("es", 5), ("s", 4)):
        if len(word) >= least and word.endswith(ending) and not word.endswith("ss"):
            cut = word[: -len(ending)]
            if ending == "ies":
                return cut + "y"
            doubled = len(cut) > 3 and cut[-1] == cut[-2] and ending in ("ing", "ed")
            return cut[:-1] if doubled else cut
    return word[:-1] if len(word) > 4 and word.endswith("e") else word


def _by_stem() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for pair in _OPPOSITES:
        one, other = map(stem, pair.split("/"))
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return {word: frozenset(others) for word, others in found.items()}


OPPOSITES = _by_stem()
"""Stems, and the stems that mean the opposite."""
