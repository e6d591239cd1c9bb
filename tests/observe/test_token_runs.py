"""Watchers that fold the tokens of a step at once end in the state of those that fold one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import pytest

from headrace.core.events import AdmitReason, Admitted, Arrived, Emitted, Event, Finished, Stepped
from headrace.core.request import FinishReason
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.requests import RequestBook
from headrace.observe.steps.timelines import MOST_TIMES_EACH, Timelines
from headrace.observe.usage import UsageBook


def ledger() -> CostLedger:
    return CostLedger(Pricing(), began=0.0)


WATCHERS: Mapping[str, Callable[[], Any]] = {
    "metrics": lambda: Metrics(MetricsPage(), clock_offset=0.0),
    "goodput": lambda: Goodput(MetricsPage()),
    "requests": RequestBook,
    "usage": UsageBook,
    "timelines": Timelines,
    "ledger": ledger,
}


PLAIN = (int, float, bool, type(None))  # most of what there is


def story(seed: int) -> list[tuple[float, list[Event]]]:
    """The events of steps: requests of two tenants and classes that come, go on at different times, and end."""
    draw, steps, number = random.Random(seed), [], 0
    live: dict[str, int] = {}
    for step in range(60):
        events: list[Event] = []
        for _ in range(draw.choice([0, 0, 3])):
            name, number = f"r{number}", number + 1
            live[name] = 0
            tenant, service_class = draw.choice(["acme", "umbrella"]), draw.choice(["default", "batch"])
            events.append(Arrived(name, 8, tenant, 0, service_class=service_class))
            events.append(Admitted(name, AdmitReason.NEW, 0, 8))
        for name in [name for name in live if draw.random() < 0.8]:
            tokens = tuple(range(draw.choice([1, 1, 1, 3, MOST_TIMES_EACH])))
            live[name] += len(tokens)
            events.append(Emitted(name, tokens))
            if draw.random() < 0.05:
                events.append(Finished(name, FinishReason.STOP, 8, live.pop(name), 0))
        events.append(Stepped(step, 0, len(live), 1, 0, 0, 0, 10, 0, 0))
        steps.append((step * 0.25, events))  # sums of these times are exact
    return steps


def state(value: Any) -> Any:
    """A value without its identity."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(key): state(each) for key, each in value.items()}
    if isinstance(value, str) or callable(value):
        return value if isinstance(value, str) else None
    if isinstance(value, Iterable):
        return [state(each) for each in value]
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in names}}
    fields = {name: each for name, each in fields.items() if name != "of" or each is not value}
    return {name: state(each) for name, each in fields.items()} if fields else value


@pytest.mark.parametrize("name", WATCHERS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_tokens_of_a_step_at_once_are_as_one_after_the_other(name: str, seed: int) -> None:
    one, together = WATCHERS[name](), WATCHERS[name]()
    for now, events in story(seed):
        for event in events:
            one.fold(event, now)
        for kind, run in groupby(events, type):
            if kind is Emitted:
                together.fold_tokens(list(run), now)
            else:
                for event in run:
                    together.fold(event, now)
    assert state(one) == state(together)
    assert state(one) != state(WATCHERS[name]())
