"""Random lives by graphs give the tokens of the simple engine; and bugs that are planted do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.compute import shared_keys
from headrace.compute.graphs import buffers
from headrace.compute.graphs.body import Ending, StepBody, Variant
from headrace.compute.graphs.steps import GraphedSteps
from headrace.compute.runner import LocalRunner
from headrace.compute.slots import Slots
from headrace.core.engine import Engine
from tests.compute.fakes import BLOCK
from tests.compute.graphs.lives import OpaqueDecoder, compare

LIVES = 60
PLANTED = 25
"""Lives in which a planted bug must show."""


@pytest.fixture(autouse=True)
def _short_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_SHARED", "LEAST_SPARED", "SHARED_TILE"):
        monkeypatch.setattr(shared_keys, name, BLOCK)


@pytest.mark.parametrize("part", range(4))
def test_random_lives(part: int) -> None:
    outcomes = [compare(seed, traced=seed % 4 == 0) for seed in range(part, LIVES, 4)]
    graphs = sum((outcome.graphs for outcome in outcomes), Counter[Variant]())
    assert graphs.total() > 10 * len(outcomes)
    assert {variant.ending for variant in graphs} == set(Ending)
    assert {variant.verifies for variant in graphs} == {False, True}
    assert sum(outcome.preempted for outcome in outcomes) > 0
    assert sum(outcome.accepted for outcome in outcomes) > 0


Planted = Callable[[pytest.MonkeyPatch], Callable[[Engine, LocalRunner], None] | None]


def stale_table(patch: pytest.MonkeyPatch) -> None:
    """New blocks reach the host's tables only."""
    grow = Slots.grow
    patch.setattr(Slots, "grow", lambda slots, rows: grow(slots, rows) and None)


def table_of_the_host(patch: pytest.MonkeyPatch) -> None:
    """A graph reads the tables that the host writes."""

    from headrace.compute.graphs import body

    batch = body.StepBody._batch

    def wrong(self: StepBody, given: Any, size: int) -> Any:
        made = batch(self, given, size)
        object.__setattr__(
            made, "block_tables", torch.from_numpy(self._slots._host_tables[given.slots.numpy()])
        )
        return made

    patch.setattr(StepBody, "_batch", wrong)


def moved_buffer(patch: pytest.MonkeyPatch) -> Callable[[Engine, LocalRunner], None]:
    """The tables are allocated anew after the graphs have been recorded."""

    def prepare(engine: Engine, runner: LocalRunner) -> None:
        runner._slots.tables = runner._slots.tables.clone()

    return prepare


def moved_buffer_unnoticed(patch: pytest.MonkeyPatch) -> Callable[[Engine, LocalRunner], None]:
    """The same, without the comparison of addresses before each replay."""
    patch.setattr(StepBody, "addresses", lambda body: ())
    return moved_buffer(patch)


def filled(change: Callable[[Any, GraphedSteps, int], None]) -> Planted:
    """The inputs are changed after they have been written."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        fill = GraphedSteps._fill

        def wrong(self: GraphedSteps, staging: Any, variant: Any, lines: Any, *rest: Any) -> None:
            fill(self, staging, variant, lines, *rest)
            change(staging.fields(variant.size), self, len(lines.rows))

        patch.setattr(GraphedSteps, "_fill", wrong)

    return plant


def _padding_writes(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.mapping[count:] = 0


def _padding_stores_tokens(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.places[count:] = into.places[max(count, 1) - 1]


def _padding_grows_tables(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.table_places[into.table_places >= (len(graphs._slots.tables) - 1) * graphs._slots.max_blocks] = 0


def _old_positions(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.contexts[:count] = np.maximum(into.contexts[:count] - 1, 1)


def _longer_prefix(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.shared[:] += BLOCK * (into.shared > 0)
    into.groups[2::4] += BLOCK * (into.groups[2::4] > 0)


def _table_of_another_row(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.groups[3::4] = np.where(into.groups[2::4] > 0, (into.groups[3::4] + 1) % max(count, 1), 0)


def _groups_of_other_tokens(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.order[:count] = into.order[:count][::-1]


def _rows_begin_early(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.starts[1:count] = np.maximum(into.starts[1:count] - 1, 0)


def _neutral_penalties(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.presence[:count] = 0


def _nothing_counted(into: Any, graphs: GraphedSteps, count: int) -> None:
    into.counted[:count] = 0


def ring_of_one(patch: pytest.MonkeyPatch) -> None:
    """Pinned memory is written while the device still has to copy from it."""
    patch.setattr(buffers.StepBuffers, "stage", lambda buffers: buffers._ring[0])


def results_too_early(patch: pytest.MonkeyPatch) -> None:
    """Tokens are read before they have arrived."""
    init = buffers.Fetched.__init__

    class Now:
        def synchronize(self) -> None:
            pass

    def early(self: Any, host: Any, free: Any, arrived: Any, *shape: int) -> None:
        init(self, host, free, Now(), *shape)

    patch.setattr(buffers.Fetched, "__init__", early)


def number_of_the_host(patch: pytest.MonkeyPatch) -> None:
    """A graph is cut to the lines of the step, a number of the host."""
    launch, run, lines = GraphedSteps.launch, StepBody.run, [1]

    def remember(self: GraphedSteps, variant: Any, given: Any, *rest: Any) -> None:
        lines[0] = len(given.rows)
        launch(self, variant, given, *rest)

    def cut(self: StepBody, variant: Any) -> None:
        run(self, variant)
        self._buffers.out[: lines[0]].clamp_(min=0)

    patch.setattr(GraphedSteps, "launch", remember)
    patch.setattr(StepBody, "run", cut)


def drafts_all_count(patch: pytest.MonkeyPatch) -> None:
    """Every drawn token counts, whether the draft before it was right or not."""
    patch.setattr(OpaqueDecoder, "accept", lambda decoder, drawn, *of_rows: drawn >= 0)


def no_join(patch: pytest.MonkeyPatch) -> None:
    """Steps of other kinds do not wait for the replays before them."""
    patch.setattr(GraphedSteps, "join", lambda graphs: None)


BUGS: dict[str, Planted] = {
    "stale table": stale_table,
    "table of the host": table_of_the_host,
    "moved buffer": moved_buffer,
    "moved buffer, unnoticed": moved_buffer_unnoticed,
    "padding writes to block 0": filled(_padding_writes),
    "padding stores tokens": filled(_padding_stores_tokens),
    "padding grows tables": filled(_padding_grows_tables),
    "contexts of the step before": filled(_old_positions),
    "one pinned array": ring_of_one,
    "results too early": results_too_early,
    "number of the host": number_of_the_host,
    "all drafts count": drafts_all_count,
    "longer prefix": filled(_longer_prefix),
    "table of another row": filled(_table_of_another_row),
    "groups of other tokens": filled(_groups_of_other_tokens),
    "rows begin early": filled(_rows_begin_early),
    "no presence penalty": filled(_neutral_penalties),
    "nothing is counted": filled(_nothing_counted),
    "no join": no_join,
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_shows(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = BUGS[bug](monkeypatch) or (lambda engine, runner: None)

    def lives() -> None:
        for seed in range(PLANTED):
            compare(seed, prepare)

    with pytest.raises((AssertionError, RuntimeError, LookupError, ValueError)):
        lives()
