"""Arrival times of requests, in seconds after the start of a run, and lengths of prompts and outputs in tokens."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence

from headrace.lab.workload.work import Work


def poisson(count: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Arrival times at a mean of ``rate`` per second; an infinite rate means all at once.

    The gaps are gamma-distributed with shape ``burstiness``: 1 is a Poisson process, less is burstier, more is more
    regular. Gaps are scaled so that the last arrival is at its expected time; otherwise the offered load of short runs
    would vary.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / sum(gaps) if count else 0.0
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times


def arriving(work: Sequence[Work], times: Sequence[float]) -> tuple[Work, ...]:
    """The same work with new arrival times, in order of arrival."""
    return tuple(dataclasses.replace(w, arrival=t) for w, t in zip(work, sorted(times), strict=True))


def gamma_process(rate: float, rng: random.Random, burstiness: float = 1.0) -> Iterator[float]:
    """Endless arrival times at a mean of ``rate`` per second; gaps as in `poisson`."""
    now = 0.0
    while True:
        now += rng.gammavariate(burstiness, 1.0) / (burstiness * rate)
        yield now


def modulated(rate: float, rng: random.Random, ratio: float, stay: float) -> Iterator[float]:
    """A Poisson process that alternates between a calm and a burst state of ``ratio`` times the calm rate.

    Each state lasts ``stay`` seconds in the mean, exponentially distributed, and the overall mean is ``rate`` (a
    two-state Markov-modulated Poisson process).
    """
    calm = 2.0 * rate / (1.0 + ratio)
    now, bursting, until = 0.0, False, rng.expovariate(1.0 / stay)
    while True:
        due = now + rng.expovariate(calm * ratio if bursting else calm)
        if due < until:
            now = due
            yield now
        else:  # memoryless: draw again from the change of state
            now, bursting, until = until, not bursting, until + rng.expovariate(1.0 / stay)


DAY = 86_400.0
DEPTH = 0.7
"""Amplitude of a day's rate relative to its mean; production traces lie between 0.5 and 0.8."""


def diurnal(rate: float, rng: random.Random, peak_hour: float = 15.0, day: float = DAY) -> Iterator[float]:
    """A Poisson process with a daily cycle: a sinusoid around ``rate`` with its peak at ``peak_hour``.

    Time 0 is midnight. Drawn by thinning (Lewis and Shedler, 1979). ``day`` is the length of a day in seconds.
    """
    most = rate * (1.0 + DEPTH)
    now = 0.0
    while True:
        now += rng.expovariate(most)
        hour = 24.0 * now / day
        wanted = rate * (1.0 + DEPTH * math.cos(2.0 * math.pi * (hour - peak_hour) / 24.0))
        if rng.random() * most < wanted:
            yield now


HIGH_VARIANCE: tuple[tuple[float, int, int], ...] = ((0.80, 4, 29), (0.16, 30, 200), (0.04, 801, 1200))
"""Shares of outputs with their minimum and maximum tokens: many short ones, few long ones."""


def log_normal(count: int, median: int, sigma: float, low: int, high: int, rng: random.Random) -> list[int]:
    """Log-normal lengths, as in production traces, clamped to ``[low, high]``.

    ``sigma`` is the standard deviation of the logarithm: 0 always gives the median, 1 is a wide spread.
    """
    most = math.log(high / median)  # avoids overflow in exp; larger values are clamped anyway
    drawn = (median * math.exp(min(most, rng.gauss(0.0, sigma))) for _ in range(count))
    return [min(high, max(low, round(length))) for length in drawn]


def mixture(count: int, shares: Sequence[tuple[float, int, int]], rng: random.Random) -> list[int]:
    """Lengths in given ranges with given shares, uniform within a range, shuffled.

    The shares are exact up to rounding, not random; the first share takes the rounding remainder.
    """
    lengths = [rng.randint(low, high) for share, low, high in shares[1:] for _ in range(round(share * count))]
    _, low, high = shares[0]
    lengths += [rng.randint(low, high) for _ in range(count - len(lengths))]
    rng.shuffle(lengths)
    return lengths


Length = Callable[[random.Random], int]
"""Draws one length."""

LONGEST = 32
"""Maximum log-normal length as a multiple of its median."""

_FORMS = "N (fixed), uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


def length(text: str) -> Length:
    """Parses a distribution of lengths: ``200``, ``uniform:50:400`` or ``lognormal:800:1.0``.

    Log-normal lengths are limited to `LONGEST` times their median.

    Raises:
        ValueError: another form, or lengths below 1.
    """
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in (rest or kind).split(":")]
        if not rest and numbers[0] >= 1:
            fixed = int(numbers[0])
            return lambda rng: fixed
        first, second = numbers
        if kind == "uniform" and 1 <= first <= second:
            low, high = int(first), int(second)
            return lambda rng: rng.randint(low, high)
        if kind == "lognormal" and first >= 1 and 0 <= second < math.inf:
            most = int(LONGEST * first)
            return lambda rng: log_normal(1, int(first), second, 1, most, rng)[0]
    except (ValueError, IndexError, OverflowError):
        pass
    raise ValueError(f"expected {_FORMS}, with lengths of at least 1 token, got {text!r}")
