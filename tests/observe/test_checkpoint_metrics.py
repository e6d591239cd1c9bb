from __future__ import annotations

from headrace.core.events import (
    CheckpointDropped,
    Checkpointed,
    DropReason,
    Recomputed,
    RecomputeReason,
    StateRestored,
)
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.testing.engines import Record, drain, hashing_engine, make_checkpoints
from tests.doubles.scenes import request
from tests.observe.test_metrics import page


def test_checkpoints_are_counted_with_their_bytes() -> None:
    sheet = MetricsPage()
    metrics = Metrics(sheet, checkpoint_bytes=100)
    for event in (
        Checkpointed("r", 16),
        Checkpointed("r", 32),
        Checkpointed("r", 48),
        CheckpointDropped(DropReason.SUPERSEDED),
        StateRestored("s", 48),
        Recomputed("s", 32, RecomputeReason.BEYOND),
    ):
        metrics.fold(event, 1.0)
    shown = page(sheet)
    assert shown["headrace:state_checkpoints"] == 2
    assert shown["headrace:state_checkpoint_bytes"] == 200
    assert shown["headrace:state_checkpoint_saves_total"] == 3
    assert shown["headrace:state_checkpoint_restores_total"] == 1
    assert shown["headrace:state_checkpoint_restored_tokens_total"] == 48
    assert shown["headrace:state_checkpoint_drops_total{reason=superseded}"] == 1
    assert shown["headrace:state_checkpoint_drops_total{reason=evicted}"] == 0
    assert shown["headrace:state_recomputed_tokens_total{reason=beyond}"] == 32


def test_the_gauge_is_the_number_of_checkpoints_of_an_engine() -> None:
    engine, _ = hashing_engine(num_blocks=16, checkpoints=make_checkpoints(3))
    sheet, record = MetricsPage(), Record()
    metrics = Metrics(sheet)
    for number in range(12):
        tokens = (*range(9), number % 5) * (1 + number % 3)
        engine.submit(request(f"r{number}", tokens=tokens, max_tokens=8), 0.0)
        drain(engine, record)
    for event in record.events:
        metrics.fold(event, 1.0)
    assert engine.scheduler.pool.checkpoints is not None
    shown = page(sheet)
    assert shown["headrace:state_checkpoints"] == len(engine.scheduler.pool.checkpoints)
    assert shown["headrace:state_checkpoint_drops_total{reason=evicted}"] > 0
    assert shown["headrace:state_checkpoint_drops_total{reason=superseded}"] > 0
    engine.reset_prefix_cache()
    for event in engine.take_events():
        metrics.fold(event, 1.0)
    assert page(sheet)["headrace:state_checkpoints"] == 0
