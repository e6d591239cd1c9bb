"""Forms of words, numbers and codes that are equal, and those that are not. The words are English. Pure text in,
values out.

`unify` gives numbers one written form, so that "7:00 am" and "7 am", "$20" and "20 dollars", "1st" and "first" compare
equal. It rewrites a text before the guards analyse it. What it does not know keeps its form, and then differs.

Two spellings are one word if one is an inflection, a form with another ending, or a slip of the keyboard. A pair of
words that are both real ("desert", "dessert") is no slip, and words with one long beginning ("stalactite",
"stalagmite", "grape", "grapefruit") are two words: only a known ending makes a form. Letters are dropped, doubled and
exchanged by a slip; a letter in place of another one mostly makes another word ("macro", "micro").

Codes, addresses, names of files, options of commands and symbols mean what they are letter by letter. A symbol that
stands at a word or between two words is code or arithmetic, other plain symbols are punctuation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import lru_cache

_UNITS = {
    word: value
    for value, word in enumerate(
        (
            *(
                "zero",
                "one",
                "two",
                "three",
                "four",
                "five",
                "six",
                "seven",
                "eight",
                "nine",
                "ten",
                "eleven",
            ),
            *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
        )
    )
}
_TENS = {
    word: 20 + 10 * place
    for place, word in enumerate(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
    )
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
_IRREGULAR = {
    "first": 1,
    "second": 2,
    "third": 3,
    "fifth": 5,
    "eighth": 8,
    "ninth": 9,
    "twelfth": 12,
    **{f"{tens[:-1]}ieth": value for tens, value in _TENS.items()},
}
_ORDINALS = _IRREGULAR | {
    f"{unit}th": value
    for unit, value in _UNITS.items()
    if f"{unit[:-1]}th" not in _IRREGULAR and value not in (*range(4), 5, 8, 9, 12)
}
_LOW_ORDINALS = {1: "first", 2: "second", 3: "third"}
"""These stay words: "second" is a time too, and a question mostly means the same without "first"."""
_ROMAN = {"ii": "2", "iii": "3", "iv": "4", "vi": "6", "vii": "7", "viii": "8", "ix": "9"}
_CURRENCIES = {"$": "dollars", "\u20ac": "euros", "\u00a3": "pounds", "\u00a5": "yen"}
_MONEY_WORDS = {
    "dollar": "$",
    "dollars": "$",
    "usd": "$",
    "bucks": "$",
    "euro": "\u20ac",
    "euros": "\u20ac",
    "eur": "\u20ac",
    "gbp": "\u00a3",
    "quid": "\u00a3",
    "yen": "\u00a5",
    "jpy": "\u00a5",
}
"""Without "pounds", which are a weight too."""
_ABBREVIATED = {
    "km": "kilometers",
    "kms": "kilometers",
    "cm": "centimeters",
    "mm": "millimeters",
    "ft": "feet",
    "kg": "kilograms",
    "kgs": "kilograms",
    "mg": "milligrams",
    "lb": "pounds",
    "lbs": "pounds",
    "oz": "ounces",
    "ml": "milliliters",
    "kb": "kilobytes",
    "mb": "megabytes",
    "gb": "gigabytes",
    "tb": "terabytes",
    "mph": "miles per hour",
    "hr": "hours",
    "hrs": "hours",
    "min": "minutes",
    "mins": "minutes",
    "sec": "seconds",
    "secs": "seconds",
    "yr": "years",
    "yrs": "years",
}

_CARDINALS = _UNITS | _TENS | _SCALES


def alternatives(phrases: Iterable[str]) -> str:
    """A pattern of any of the phrases, the longest first.

    Those with one first letter are grouped, because each alternative is tried at each word.
    """
    found: dict[str, list[str]] = {}
    for phrase in sorted(phrases, key=len, reverse=True):
        found.setdefault(phrase[0], []).append(re.escape(phrase[1:]))
    return "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in found.items())


_ANY = alternatives({*_CARDINALS, *_ORDINALS})
_FIRST = alternatives({*_CARDINALS, *_ORDINALS} - {"one", "first", "second", "third"})
_SCALED = "|".join(_SCALES)
_PHRASE = re.compile(
    rf"\b(?:{_FIRST}|one(?=[\s-]+(?:{_SCALED})\b))(?:(?:\s+and\s+|[\s-]+)(?:{_ANY})\b)*\b", re.IGNORECASE
)
_HALF_DOZEN = re.compile(r"\bhalf[\s-]+(?:an?[\s-]+)?dozen\b", re.IGNORECASE)
_AND_A_HALF = re.compile(r"\b(\d+|one)\s+and\s+(?:a|one)\s+half\b", re.IGNORECASE)
_TIMES = re.compile(rf"\b(\d[\d,]*(?:\.\d+)?)[\s-]+({_SCALED})\b", re.IGNORECASE)
_HALF_DAY = re.compile(r"(?<![^\W\d_])([ap])\.\s?m\b\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d)(?:[:.]00)?\s*([ap]m)\b", re.IGNORECASE)
_OCLOCK = re.compile(r"(\d)(?::00)?\s+o\s?['\u2019]?\s?clock\b", re.IGNORECASE)
_ORDINAL = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b", re.IGNORECASE)
_PERCENT = re.compile(r"(\d)\s*(?:%|per\s?cent\b)", re.IGNORECASE)
_BEFORE = re.compile(r"([$\u20ac\u00a3\u00a5])\s?(\d[\d.,]*\d|\d)")
_AFTER = re.compile(r"(\d)\s?([\u20ac\u00a3\u00a5]|\$(?!\s*\d))(?!\w)")
_MONEY = re.compile(rf"(\d)[\s-]*({'|'.join(sorted(_MONEY_WORDS, key=len, reverse=True))})\b", re.IGNORECASE)
_MEASURE = re.compile(rf"(\d)\s*({'|'.join(sorted(_ABBREVIATED, key=len, reverse=True))})\b", re.IGNORECASE)
_DEGREES = re.compile(r"(\d)\s*(?:\u00b0|degrees?\b)\s*(?:(c)(?:elsius)?|(f)(?:ahrenheit)?)\b", re.IGNORECASE)
_ROMANS = re.compile(rf"\b(?:{'|'.join(_ROMAN)})\b", re.IGNORECASE)
_SPLIT = re.compile(r"[\s-]+")


def unify(text: str) -> str:
    """``text`` with one form for numbers, times, percentages, money, units and ordinals from four on."""
    if "dozen" in text.lower():
        text = _HALF_DOZEN.sub("6", text)
    text = _TIMES.sub(lambda found: _scaled(found[1], found[2]), text)
    text = _PHRASE.sub(lambda found: _digits(_SPLIT.split(found[0].lower())), text)
    text = _AND_A_HALF.sub(lambda found: f"{1 if found[1].isalpha() else found[1]}.5", text)
    text = _HALF_DAY.sub(r"\1m", text)
    if any(character.isdigit() for character in text):
        text = _DEGREES.sub(lambda found: f"{found[1]} {_temperature(found[2])}", text)
        text = _OCLOCK.sub(r"\1", _CLOCK.sub(r"\1 \2", text))
        text = _ORDINAL.sub(lambda found: _ordinal(found[1]), text)
        text = _PERCENT.sub(r"\1 % ", text)
        text = _AFTER.sub(lambda found: f"{found[1]} {_money(found[2])}", text)
        text = _MONEY.sub(lambda found: f"{found[1]} {_money(_MONEY_WORDS[found[2].lower()])}", text)
        text = _BEFORE.sub(lambda found: f"{found[2]} {_money(found[1])}", text)
        text = _MEASURE.sub(lambda found: f"{found[1]} {_ABBREVIATED[found[2].lower()]}", text)
    return _ROMANS.sub(lambda found: _ROMAN[found[0].lower()], text)


def _money(symbol: str) -> str:
    """A currency after an amount: its symbol and its name."""
    return f"{symbol} {_CURRENCIES[symbol]}"


def _temperature(celsius: str | None) -> str:
    return "degrees celsius" if celsius else "degrees fahrenheit"


def _digits(words: list[str]) -> str:
    """The numbers that a sequence of number words spells."""
    done: list[str] = []
    total = 0
    part: int | None = None

    def end(mark: str = "") -> None:
        nonlocal total, part
        if part is not None or total:
            number = total + (part or 0)
            done.append(_ordinal(str(number)) if mark else str(number))
        total, part = 0, None

    for word in words:
        if word == "and":
            if (part is None and not total) or (part or 0) % 100:
                end()
            continue
        ordinal = word not in _CARDINALS
        value = _ORDINALS[word] if ordinal else _CARDINALS[word]
        if word in _SCALES:
            if value >= 1000:
                total, part = total + (1 if part is None else part) * value, None
            else:
                part = (1 if part is None else part) * value
            continue
        joins = part is not None and (
            (part and part % 100 == 0 and value < 100)
            or (20 <= part % 100 <= 90 and part % 10 == 0 < value < 10)
        )
        if part is not None and not joins:
            end()
        part = value if part is None else part + value
        if ordinal:
            end("th")
    end()
    return " ".join(done)


def _scaled(number: str, scale: str) -> str:
    return format((Decimal(number.replace(",", "")) * _SCALES[scale.lower()]).normalize(), "f")


def _ordinal(number: str) -> str:
    if len(number) > 12:  # no ordinal: Python limits the digits that it converts
        return f"{number}th"
    return _LOW_ORDINALS.get(int(number), f"{int(number)}th")


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


_SYMBOL = re.compile(r"[^\w\s]")
_BETWEEN = re.compile(r"(?:\d\w?|\)|\b[^\W\d_])\s*([-*/]+)\s*(?=[\d(.$\u20ac\u00a3-]|[^\W\d_]\b)")
_SIGN = re.compile(r"(?<![\w)])-(?=[$\u20ac\u00a3]?\.?\d)")
"""Between two numbers or single letters, or before a number, a plain symbol is arithmetic."""
_CODE = re.compile(r"(?<!\w)(?=\w*\d)(?=\w*[^\W\d_])[\w.-]*\w|[^\W\d_][+#]+")
"""Letters with digits (M604n, iphone-6s), and C++ or C#. Only the first letter of a word is a beginning: from every
letter of a long word, the search would take quadratic time."""
_ADDRESS = re.compile(r"\bhttps?://\S+|\bwww\.\S+|\b\w+_\w+\b|(?<![\w/])/\w+(?:/[\w.-]+)+")
"""Addresses, paths and identifiers with underscores, whose words mean nothing alone."""
_FILE = re.compile(r"(?<![\w./-])\w[\w-]+(?:\.[\w-]+)*\.[a-z][a-z0-9]{0,4}(?![\w/])", re.IGNORECASE)
"""Names of files and hosts, each of which is one name."""
_PREFIXED = re.compile(r"(?<![^\s\"'(`\u2018\u201c])(?:--?|!|\*|\.{0,2}/|\\|~/)[^\W\d_]\w*(?![\w*])")
"""Options (-v and -V differ), operators (!x, *x) and paths (./run, /run) with their word, as they are written."""
_BRACKETED = re.compile(r"\w\[[^\s\]]*\]")
_PARSED = re.compile(r"\w+|[^\w\s]")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_TERMS = frozenset(
    (
        "+",
        "*",
        "/",
        "^",
        "|",
        "&",
        "=",
        "<",
        ">",
        "!",
        ",",
        "and",
        "or",
        "not",
        "plus",
        "minus",
        "times",
        "off",
        "%",
        *_OPENING,
        *_CLOSING,
    )
)
"""Symbols and words of terms: brackets with one inside or at them count."""
_PLAIN_SYMBOLS = frozenset(".,;:!?'\"()[]{}-_/\\`*\u2019\u2018\u201c\u201d\u2013\u2014\u2026")


def identifiers(text: str) -> Counter[str]:
    """Codes, addresses, names of files, symbols of arithmetic and others that are not punctuation."""
    found: list[str] = _BETWEEN.findall(text) + _SIGN.findall(text)
    found += [token for token in _SYMBOL.findall(text) if token not in _PLAIN_SYMBOLS]
    for form in (_CODE, _ADDRESS, _FILE):
        found += map(str.lower, form.findall(text))
    for form in (_PREFIXED, _BRACKETED):
        found += form.findall(text)
    if not _OPENING.isdisjoint(text):
        found += _brackets(text)
    return Counter(found)


def _brackets(text: str) -> Iterator[str]:
    """The brackets of terms, of code and of logic, each with the word or symbol inside of it next to it."""
    tokens = list(_PARSED.finditer(text))
    open_at: list[int] = []
    for place, token in enumerate(tokens):
        if token[0] in _OPENING:
            open_at.append(place)
        elif token[0] in _CLOSING and open_at:
            start = open_at.pop()
            inside = [each[0].lower() for each in tokens[start + 1 : place]]
            beside = {
                each[0] for each in (*tokens[max(0, start - 1) : start], *tokens[place + 1 : place + 2])
            }
            attached = start > 0 and tokens[start - 1].end() == tokens[start].start() and len(inside) != 1
            subtracts = "-" in (*inside, *beside) and any(each[0].isdigit() for each in inside)
            if attached or token[0] != ")" or not _TERMS.isdisjoint((*inside, *beside)) or subtracts:
                yield f"{tokens[start][0]}{(inside or [''])[0]}"
                yield f"{(inside or [''])[-1]}{token[0]}"
