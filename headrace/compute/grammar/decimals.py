"""Regular expressions of the decimal texts of a range, at their exact value.

```
 at least 12.5    1[3-9]|[2-9][0-9]|[1-9][0-9]{2,}  with any fraction  |  12.[6-9]…  |  12.5 and more digits
 at most 12.5     [0-9]|1[0-1]                      with any fraction  |  12, 12.[0-4]…, 12.5 and zeros
```
A range is the intersection of two such half-lines, and the negative numbers are a minus and the magnitudes. Bounds are
`Decimal`, so no bound is rounded. The texts are without an exponent, except where any number is allowed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from fractions import Fraction
from math import gcd, lcm

MAX_DIGITS = 400
"""The most digits of a bound; the largest number of 64 bits has 309."""

LONG = 4_000
"""From so many characters on, llguidance may take an intersection for empty."""

MAX_MULTIPLES = 512
"""Up to so many multiples of a range are written as a list."""

EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)

ANY_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][\-+]?([0-9]{1,2}|[12][0-9]{2}))?/"
"""Exponents are below 300, since decoders read larger ones as infinity or refuse them."""

_FRACTION = r"(\.[0-9]+)?"
_NOT_ZERO = "[0-9]*[1-9][0-9]*"


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers between two bounds (None: unbounded); ``integer``: whole ones; ``step``: multiples of it (0: any)."""

    low: Decimal | None = None
    high: Decimal | None = None
    open_low: bool = False
    open_high: bool = False
    integer: bool = False
    step: Fraction = Fraction(0)

    def narrowed(self) -> Range | None:
        """The same numbers with closed bounds that are multiples, if there is a step; None if there is no number."""
        made = self
        step = _common(self.step, Fraction(1)) if self.integer else self.step
        if step:
            whole = step.denominator == 1
            low = None if self.low is None else _next_multiple(self.low, step, self.open_low)
            high = None if self.high is None else -_next_multiple(-self.high, step, self.open_high)
            made = Range(
                None if low is None else exact(low),
                None if high is None else exact(high),
                integer=whole,
                step=step,
            )
        if made.low is None or made.high is None or made.low < made.high:
            return made
        return made if made.low == made.high and not (made.open_low or made.open_high) else None

    def with_step(self, step: Fraction) -> Range:
        """The multiples of ``step`` among the numbers."""
        joined = _common(self.step, step) if self.step else step
        return Range(self.low, self.high, self.open_low, self.open_high, self.integer, joined)

    def has(self, value: Decimal) -> bool:
        """Whether the number ``value`` is one of them."""
        if self.low is not None and (value < self.low or (self.open_low and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.open_high and value == self.high)):
            return False
        number = Fraction(value)
        if self.integer and number.denominator != 1:
            return False
        return not self.step or (number / self.step).denominator == 1


def terminal(numbers: Range) -> str | None:
    """The texts of a narrowed range as a terminal of Lark; None if its step is not a decimal place."""
    step, text = numbers.step, None
    if numbers.low is not None and numbers.low == numbers.high:
        return one_of([numbers.low])
    if step and step != 1:
        count = _count(numbers)
        if count is not None and count <= MAX_MULTIPLES:
            return one_of([exact(Fraction(numbers.low or 0) + i * step) for i in range(count)])
        text = _multiples(step)
        if text is None:
            return None
    if numbers.low is None and numbers.high is None and not step:
        return ANY_NUMBER
    parts = []
    if numbers.low is None or numbers.low < 0:
        top = None if numbers.low is None else -numbers.low
        bottom = Decimal(0) if numbers.high is None or numbers.high > 0 else -numbers.high
        open_bottom = numbers.open_high and numbers.high is not None and numbers.high <= 0
        inner = _magnitudes(bottom, open_bottom, top, numbers.open_low, numbers.integer)
        parts.append(f'"-" ({inner})')
    if numbers.high is None or numbers.high > 0 or (numbers.high == 0 and not numbers.open_high):
        bottom = Decimal(0) if numbers.low is None or numbers.low < 0 else numbers.low
        open_bottom = numbers.open_low and numbers.low is not None and numbers.low >= 0
        parts.append(_magnitudes(bottom, open_bottom, numbers.high, numbers.open_high, numbers.integer))
    whole = " | ".join(f"({part})" for part in parts)
    return f"({whole}) & /{text}/" if text else whole


def _multiples(step: Fraction) -> str | None:
    """The texts of the multiples of ``step`` if their last digits tell; None otherwise."""
    places = _places(step)
    if step == Fraction(1, 10**places):
        return rf"-?[0-9]+(\.[0-9]{{1,{places}}}0*)?"
    if step < 1:
        count = (1 / step).numerator
        if (1 / step).denominator != 1 or count > MAX_MULTIPLES:
            return None
        ends = [f"{exact(i * step):f}".partition(".")[2].rstrip("0") + "0*" for i in range(1, count)]
        return rf"-?[0-9]+(\.({'|'.join(ends)}|0+))?"
    size = next((size for size in range(1, 19) if not 10**size % step), None) if not places else None
    count = 0 if size is None else int(10**size / step)
    if size is None or count > MAX_MULTIPLES:
        return None
    values = [int(i * step) for i in range(count)]
    ends = [f"{value:0{size}d}" for value in values]
    return f"-?([0-9]*({'|'.join(ends)})|{'|'.join(str(value) for value in values)})"


def one_of(values: list[Decimal]) -> str:
    """The texts of some numbers as a terminal."""
    return " | ".join(json.dumps(text_of(value)) for value in values)


def text_of(value: Decimal) -> str:
    """The text of a number: plain digits, or an exponent where there would be many zeros."""
    value = EXACT.create_decimal(value).normalize(EXACT)
    exponent = value.as_tuple().exponent
    if not value:
        return "0"
    if not isinstance(exponent, int) or exponent > 40 or value.adjusted() < -40:
        return str(value).replace("E", "e")
    return f"{value:f}"


def _magnitudes(low: Decimal, open_low: bool, high: Decimal | None, open_high: bool, integer: bool) -> str:
    """The texts without a sign of the numbers from ``low`` >= 0 to ``high``."""
    least = f"/{_at_least(low, not open_low, integer)}/"
    if high is None:
        return least
    most = f"/{_at_most(high, not open_high, integer)}/"
    return most if not low and not open_low else f"{least} & {most}"


def _digits(value: Decimal) -> tuple[str, str]:
    """The digits before and behind the point, without needless zeros."""
    whole, _, fraction = f"{value:f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def _at_least(value: Decimal, closed: bool, integer: bool) -> str:
    whole, fraction = _digits(value)
    size, tail = len(whole), "" if integer else _FRACTION
    parts = [f"[1-9][0-9]{{{size},}}{tail}"]
    for i, digit in enumerate(whole):
        if digit < "9":
            parts.append(f"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{size - 1 - i}}}{tail}")
    if integer:
        return "|".join([*parts, *([whole] if closed else [])])
    if not fraction:
        parts.append(whole + (_FRACTION if closed else rf"\.{_NOT_ZERO}"))
        return "|".join(parts)
    behind = [f"{fraction[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in enumerate(fraction) if digit < "9"]
    behind.append(fraction + ("[0-9]*" if closed else _NOT_ZERO))
    return "|".join([*parts, rf"{whole}\.({'|'.join(behind)})"])


def _at_most(value: Decimal, closed: bool, integer: bool) -> str:
    whole, fraction = _digits(value)
    size, tail = len(whole), "" if integer else _FRACTION
    parts = [f"0{tail}", f"[1-9][0-9]{{0,{size - 2}}}{tail}"] if size > 1 else []
    for i, digit in enumerate(whole):
        least = 1 if i == 0 and size > 1 else 0
        if int(digit) > least:
            parts.append(f"{whole[:i]}[{least}-{int(digit) - 1}][0-9]{{{size - 1 - i}}}{tail}")
    if integer or not fraction:
        if closed:
            parts.append(whole if integer else rf"{whole}(\.0+)?")
        return "|".join(parts)
    behind = [f"{fraction[:i]}[0-{int(digit) - 1}][0-9]*" for i, digit in enumerate(fraction) if digit > "0"]
    behind += [fraction[:i] for i in range(1, len(fraction))]
    if closed:
        behind.append(fraction + "0*")
    return "|".join([*parts, rf"{whole}(\.({'|'.join(behind)}))?" if behind else whole])


def _common(a: Fraction, b: Fraction) -> Fraction:
    """The least common multiple; 0: no step."""
    if not a or not b:
        return a or b
    return Fraction(lcm(a.numerator, b.numerator), gcd(a.denominator, b.denominator))


def _next_multiple(value: Decimal, step: Fraction, beyond: bool) -> Fraction:
    """The least multiple of ``step`` at or behind ``value``."""
    count = Fraction(value) / step
    floor = count.numerator // count.denominator
    up = floor if floor == count else floor + 1
    return (up + 1 if beyond and up == count else up) * step


def exact(value: Fraction) -> Decimal:
    """A fraction that has a decimal text."""
    places = _places(value)
    return Decimal(value.numerator * 10**places // value.denominator).scaleb(-places, EXACT)


def _places(value: Fraction) -> int:
    """Digits behind the point."""
    places, rest = 0, value.denominator
    while rest > 1:
        places += 1
        rest //= 10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5
    return places


def _count(numbers: Range) -> int | None:
    if numbers.low is None or numbers.high is None:
        return None
    return int((Fraction(numbers.high) - Fraction(numbers.low)) / numbers.step) + 1
