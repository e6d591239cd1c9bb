"""One written form for numbers, so that "7:00 am" and "7 am", "$20" and "20 dollars", "1st" and "first" compare equal.

`unify` rewrites a text before the guards analyse it. What it does not know keeps its form, and then differs. The words
are English. Pure text in, text out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

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
