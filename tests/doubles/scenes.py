"""Short ways to say what a test of the core needs: a request, an engine in mid-flight, what was told."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.engine import Engine
from headrace.core.events import Admitted, Chunked, Event, Skipped
from headrace.core.plan import StepPlan
from headrace.testing.checks import make_request as request
from headrace.testing.engines import Record

__all__ = ["admitted", "chunks", "plans", "request", "skips", "step", "texts"]


def step(engine: Engine, record: Record, count: int = 1, now: float = 0.0) -> None:
    """Make ``count`` steps and check the books after each."""
    for _ in range(count):
        record.fold(engine.step(now))
        engine.check_consistency()


def texts(events: Iterable[Event]) -> dict[str, list[int]]:
    """The tokens of each request."""
    record = Record()
    record.fold(list(events))
    return record.tokens


def admitted(record: Record) -> list[str]:
    """Who began to run, or began again, in order."""
    return [event.request_id for event in record.of(Admitted)]


def plans(engine: Engine) -> list[StepPlan]:
    """A list that every later plan of the engine is added to."""
    seen: list[StepPlan] = []
    launch = engine.runner.launch

    def spy(plan: StepPlan, now: float) -> None:
        seen.append(plan)
        launch(plan, now)

    engine.runner.launch = spy  # type: ignore[method-assign]
    return seen


def chunks(record: Record, request_id: str) -> list[tuple[int, int, str]]:
    """Start, length and reason of each row of prefill."""
    return [(e.start, e.length, e.reason.value) for e in record.of(Chunked) if e.request_id == request_id]


def skips(record: Record, request_id: str) -> list[str]:
    """The reasons for which a request had to wait, as they were told."""
    return [e.reason.value for e in record.of(Skipped) if e.request_id == request_id]
