"""Arrival times of requests, lengths of prompts and outputs in tokens, and synthetic tenants, each with its own.

```
 tenant=chat,class=priority,rate=5,arrivals=bursty:0.3,prompt=lognormal:800:1.0,answer=uniform:50:400,turns=4,system=1000
```
A tenant's conversations share its system prompt, and each turn contains all turns before it, outputs included. Times
are in seconds after the start of a run.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from headrace.lab.workload.traces import read_trace
from headrace.lab.workload.work import Call, Span, Work


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


def diurnal(rate: float, rng: random.Random, peak_hour: float = 15.0) -> Iterator[float]:
    """A Poisson process with a daily cycle: a sinusoid around ``rate`` with its peak at ``peak_hour``.

    Time 0 is midnight. Drawn by thinning (Lewis and Shedler, 1979).
    """
    most = rate * (1.0 + DEPTH)
    now = 0.0
    while True:
        now += rng.expovariate(most)
        hour = 24.0 * now / DAY
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


KEYS = ("tenant", "class", "rate", "arrivals", "prompt", "answer", "lengths", "turns", "system", "think")
STREAMS = 1 << 24
"""Stream numbers reserved per tenant, for its system prompt and its conversations."""


class BadPopulation(ValueError):
    """A tenant specification that cannot be parsed."""


Lengths = Callable[[random.Random], tuple[int, int]]
"""Draws the new prompt tokens and the output tokens of one call jointly, because they are correlated in traces."""

Rhythm = Callable[[float, random.Random], Iterator[float]]
"""Endless arrival times at a mean rate."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. ``rate`` is in conversations per second.

    ``turns`` is the mean number of calls of a conversation (geometric distribution), and ``think_seconds`` the mean
    time between them. Every prompt begins with ``system_tokens`` of system prompt.
    """

    name: str
    service_class: str
    rate: float
    rhythm: Rhythm
    lengths: Lengths
    turns: float
    system_tokens: int
    think_seconds: float

    def calls(self, number: int, seed: int) -> Iterator[Call]:
        """Endless calls in order of arrival; ``number`` separates the content of tenants."""
        rng = random.Random(f"{seed}/{number}/{self.name}")
        starts = self.rhythm(self.rate, rng)
        system = Span(number * STREAMS, 0, self.system_tokens)
        open_turns: list[tuple[float, int, int]] = []  # due, stream, tokens so far
        streams = count(number * STREAMS + 1)
        following = next(starts)
        while True:
            if open_turns and open_turns[0][0] <= following:
                now, stream, known = heapq.heappop(open_turns)
            else:
                now, stream, known = following, next(streams), 0
                following = next(starts)
            asked, answered = self.lengths(rng)
            spoken = Span(stream, 0, known + asked)
            content = (system, spoken) if self.system_tokens else (spoken,)
            tokens = self.system_tokens + spoken.length
            answer = Span(stream, spoken.length, answered)
            yield Call(now, tokens, answered, self.name, self.service_class, content, answer)
            if rng.random() < 1.0 - 1.0 / self.turns:
                think = rng.expovariate(1.0 / self.think_seconds)
                heapq.heappush(open_turns, (now + think, stream, spoken.length + answered))


def parse(text: str) -> Tenant:
    """Parses ``KEY=VALUE,…`` with the keys of `KEYS`.

    ``arrivals`` is ``poisson``, ``bursty:SHAPE`` (gamma gaps), ``mmpp:RATIO:SECONDS`` or ``diurnal[:PEAK_HOUR]``;
    ``prompt`` and ``answer`` are distributions (`length`), ``lengths`` a trace file for both.

    Raises:
        BadPopulation: an unknown key, or an invalid value.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in KEYS:
            raise BadPopulation(
                f"workload {text!r}: expected KEY=VALUE with KEY one of {', '.join(KEYS)}, got {part!r}"
            )
        given[key] = value
    try:
        return Tenant(
            name=given.get("tenant", "default"),
            service_class=given.get("class", "default"),
            rate=_positive("rate", given.get("rate", "1")),
            rhythm=_rhythm(given.get("arrivals", "poisson")),
            lengths=_lengths(given),
            turns=_positive("turns", given.get("turns", "1"), least=1.0),
            system_tokens=int(_positive("system", given.get("system", "0"), least=0.0)),
            think_seconds=_positive("think", given.get("think", "30")),
        )
    except (ValueError, OSError) as error:
        raise BadPopulation(f"workload {text!r}: {error}") from None


def calls(tenants: Sequence[Tenant], count: int, seed: int = 0) -> Iterator[Call]:
    """The first ``count`` calls of all tenants together."""
    streams = (tenant.calls(number, seed) for number, tenant in enumerate(tenants))
    return islice(heapq.merge(*streams, key=lambda call: call.arrival), count)


def _positive(name: str, text: str, least: float = math.ulp(0.0)) -> float:
    value = float(text)
    if not (least <= value < math.inf):
        raise ValueError(f"{name} must be at least {least:g}, got {text}")
    return value


def _rhythm(text: str) -> Rhythm:
    kind, *numbers = text.split(":")
    values = [_positive("arrivals", number) for number in numbers]
    match kind, values:
        case "poisson", []:
            return lambda rate, rng: gamma_process(rate, rng)
        case "bursty", [shape]:
            return lambda rate, rng: gamma_process(rate, rng, shape)
        case "mmpp", [ratio, stay]:
            return lambda rate, rng: modulated(rate, rng, ratio, stay)
        case "diurnal", []:
            return lambda rate, rng: diurnal(rate, rng)
        case "diurnal", [peak]:
            return lambda rate, rng: diurnal(rate, rng, peak)
    raise ValueError(
        f"arrivals={text}: expected poisson, bursty:SHAPE, mmpp:RATIO:SECONDS or diurnal[:PEAK_HOUR]"
    )


def _lengths(given: dict[str, str]) -> Lengths:
    if path := given.get("lengths"):
        pairs = [(call.prompt_tokens, call.output_tokens) for call in read_trace(Path(path))]
        if not pairs:
            raise ValueError(f"{path} has no calls to draw lengths from")
        return lambda rng: rng.choice(pairs)
    prompt: Length = length(given.get("prompt", "lognormal:800:1.0"))
    answer: Length = length(given.get("answer", "lognormal:150:0.8"))
    return lambda rng: (prompt(rng), answer(rng))
