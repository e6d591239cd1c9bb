"""Random lives of the pure core, recorded to files, and what lives them again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.core.drafting.acceptance import Acceptance
from headrace.core.drafting.draft_budget import DraftBudget
from headrace.core.drafting.drafter import BudgetedDrafter
from headrace.core.drafting.proposal import Drafter
from headrace.core.engine import Engine
from headrace.core.ports import Runner
from headrace.lab.forced_acceptance import ForcedAcceptance
from headrace.observe.recording import RecordedDrafter, RecordedEngine
from headrace.observe.trace_file import Begun, Moment, Scribe
from headrace.testing.engines import Record, hashing_engine
from tests.property import random_runs

Compose = Callable[[Mapping[str, Any], Runner, Drafter | ForcedAcceptance], Engine]


def record_life(seed: int, path: Path, monkeypatch) -> tuple[Record, Compose]:
    """Records the random life of a seed; what it told, and how its engine is composed anew."""
    moments: list[Moment] = [Begun("test", {})]
    kept: dict[str, Any] = {}

    def make(**kwargs):
        kwargs |= {
            "peers": None
        }  # with peers nothing is recorded (`build.loading.kv_transfer.check_transfer`)
        kept.update(copy.deepcopy(kwargs))
        drafter = kwargs["drafter"]
        engine, runner = hashing_engine(**kwargs | {"drafter": drafter and RecordedDrafter(drafter)})
        return recorded(engine, moments.append), runner

    monkeypatch.setattr(random_runs, "hashing_engine", make)
    reported = random_runs.run(seed)
    write(path, moments)

    def compose(settings: Mapping[str, Any], runner: Runner, drafter: Drafter | ForcedAcceptance) -> Engine:
        if isinstance(drafter, ForcedAcceptance):
            drafter = BudgetedDrafter([drafter], Acceptance(), DraftBudget(4))
        engine, _ = hashing_engine(**copy.deepcopy(kept) | {"drafter": drafter})
        engine.runner = runner
        return engine

    return reported, compose


def recorded(engine: Engine, tell: Callable[[Moment], None]) -> RecordedEngine:
    """The engine, with a tape behind it."""
    parts = (engine.scheduler, engine.runner, engine._events, engine.knobs, engine.overlap)
    return RecordedEngine(*parts, tell)


def write(path: Path, moments: list[Moment]) -> None:
    scribe = Scribe(b"a secret")
    path.write_text("".join(json.dumps(scribe.line(moment)) + "\n" for moment in moments))
