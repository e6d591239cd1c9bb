"""Synthetic tenants, each with its own rate, arrival process, lengths and conversations.

```
 tenant=chat,class=priority,rate=5,arrivals=bursty:0.3,prompt=lognormal:800:1.0,answer=uniform:50:400,turns=4,system=1000
```
A tenant's conversations share its system prompt, and each turn contains all turns before it, outputs included.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from headrace.lab.workload.call import Call, Span
from headrace.lab.workload.distributions import Length, diurnal, gamma_process, length, modulated
from headrace.lab.workload.traces import read_trace

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
    ``prompt`` and ``answer`` are distributions (`distributions.length`), ``lengths`` a trace file for both.

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
