"""What a text asks for: why, when, where, who, how to do something, or whether something holds.

Two texts that share their frame ask for different things if only one asks why, when, where or who, or if one asks how
to do something and the other whether. "When" and "where" inside of a sentence are no questions. The words are English.
Pure words in, values out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from headrace.response_cache.rules.statements import MEASURES
from headrace.response_cache.rules.word_classes import FUNCTION_WORDS

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
_ASKING = frozenset(("tell", "me", "know", "wonder", "wondering", "see", "check", "ask", "sure", "us"))
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
    if "whether" in words or any(b == "if" and a in _ASKING for a, b in pairwise(words)):
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
