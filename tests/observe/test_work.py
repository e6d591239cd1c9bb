"""Operations and bytes of steps, utilization and saturation."""

from __future__ import annotations

import math

import pytest

from headrace.core.events import AdmitReason, Admitted, Arrived, Stepped, StepRows
from headrace.core.plan import Row
from headrace.lab.plan.roofline import SHAPES, Load, Replica, device
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.work import NO_WORK, ModelWork, Peaks, StepWork, WorkMeter, work_of

MODEL = ModelWork(100, 10, 8, 1000, 4)


def stepped(*rows: Row, began: float = 0.0) -> Stepped:
    work = StepRows(began, ("x",) * len(rows), rows)
    decodes = sum(row.length == 1 for row in rows)
    return Stepped(0, decodes, len(rows) - decodes, sum(row.length for row in rows), 4, 0, 3, 10, 0, 0, work)


def test_a_decode_step() -> None:
    """Two tokens that attend to 5 and 8 positions, themselves included."""
    work = work_of(stepped(Row(0, 4, 1, (), True), Row(1, 7, 1, (), True)), MODEL).decode
    assert work.flops == 2 * (100 * 2 + 10 * 2) + 4 * 8 * (5 + 8)
    assert work.bytes == 1000 + 4 * (13 + 2)


def test_a_step_with_a_chunk_of_a_prompt() -> None:
    """Positions 2, 3 and 4 attend to 3, 4 and 5; the row reads each position once and draws nothing."""
    prefill, decode = work_of(stepped(Row(0, 4, 1, (), True), Row(1, 2, 3, (), False)), MODEL)
    assert decode.flops == 2 * (100 + 10) + 4 * 8 * 5
    assert prefill.flops == 2 * 100 * 3 + 4 * 8 * (3 + 4 + 5)
    assert decode.bytes == 1000 / 4 + 4 * (5 + 1)
    assert prefill.bytes == 1000 * 3 / 4 + 4 * (5 + 3)


def test_phases_of_a_mixed_step_add_up_to_the_step() -> None:
    """A row with drafts is a decode row, although it has several tokens."""
    rows = [Row(0, 4, 1, (), True), Row(1, 9, 3, (), True, (7, 8)), Row(2, 0, 6, (), True)]
    tokens = sum(row.length for row in rows)
    mixed = Stepped(0, 2, 1, tokens, 3, 0, 1, 9, 0, 0, StepRows(0.0, ("a", "b", "c"), tuple(rows)))
    alone = mixed._replace(decode_rows=3, prefill_rows=0)
    work, whole = work_of(mixed, MODEL), work_of(alone, MODEL).decode
    assert work.prefill.flops + work.decode.flops == whole.flops
    assert work.prefill.bytes + work.decode.bytes == pytest.approx(whole.bytes)
    assert work.prefill.flops == 2 * (100 * 6 + 10) + 4 * 8 * 21


def test_the_count_is_that_of_the_roofline() -> None:
    shape = SHAPES["llama-3.1-8b"]
    replica = Replica(shape, device("H100-SXM"))
    width = shape.num_layers * shape.num_heads * shape.head_dim
    model = ModelWork(shape.linear_parameters, shape.table_parameters, width, 0, 0)
    rows = [Row(slot, 999, 1, (), True) for slot in range(8)]
    load = Load(8, 0, 8000, 8000, 8)
    assert work_of(stepped(*rows), model).decode.flops == pytest.approx(replica.flops(load))


def test_a_row_reads_and_writes_recurrent_states() -> None:
    rows = [Row(slot, 9, 1, (), True) for slot in range(3)]
    states = work_of(stepped(*rows), MODEL._replace(state_bytes=100)).decode.bytes
    assert states - work_of(stepped(*rows), MODEL).decode.bytes == 2 * 3 * 100


def test_no_rows_no_work() -> None:
    assert work_of(stepped(), MODEL) == (NO_WORK, NO_WORK)


class Scene:
    """A request that computes for two of ten seconds."""

    def __init__(self, peaks: Peaks) -> None:
        self.page, self.now = MetricsPage(), 10.0
        self.ledger = CostLedger(Pricing())
        self.meter = WorkMeter(self.page, self.ledger, MODEL, lambda: self.now, slots=16, peaks=peaks)
        step = stepped(Row(0, 4, 1, (), True), began=8.0)
        for event in (Arrived("x", 4, "a", 0, 8.0), Admitted("x", AdmitReason.NEW, 0, 4), step):
            self.ledger.fold(event, 10.0)
            self.meter.fold(event, 10.0)

    def value(self, name: str) -> float | None:
        for line in self.page.render().decode().splitlines():
            if line.startswith(f"headrace:{name}"):
                return float(line.split()[-1])
        return None


def test_utilization_of_the_peaks() -> None:
    scene = Scene(Peaks(flops=1000.0, bytes_per_second=10_000.0))
    assert scene.value('estimated_flops_total{phase="decode"}') == 380.0
    assert scene.value('estimated_flops_total{phase="prefill"}') == 0.0
    assert scene.value('estimated_bytes_total{phase="decode"}') == 1024.0
    for phase in ("all", "decode"):
        assert scene.value(f'model_flops_utilization{{phase="{phase}"}}') == pytest.approx(380 / (2 * 1000))
        used = scene.value(f'memory_bandwidth_utilization{{phase="{phase}"}}')
        assert used == pytest.approx(1024 / (2 * 10_000))
    assert scene.value('model_flops_utilization{phase="prefill"}') == 0.0
    assert scene.meter.tokens == 1
    assert scene.meter.done() == StepWork(380.0, 1024.0)


def test_time_of_a_mixed_step_is_divided_between_its_phases() -> None:
    """Utilization of both phases, weighted by their seconds, is that of all steps."""
    scene = Scene(Peaks(flops=1000.0, bytes_per_second=10_000.0))
    step = stepped(Row(0, 5, 1, (), True), Row(1, 0, 5, (), False), began=10.0)
    scene.now = 12.0
    scene.ledger.fold(step, 12.0)
    scene.meter.fold(step, 12.0)
    seconds = {"prefill": scene.ledger.prefill_seconds, "decode": scene.ledger.decode_seconds}
    assert 0.0 < seconds["prefill"] < 2.0
    shares = {phase: scene.value(f'model_flops_utilization{{phase="{phase}"}}') for phase in seconds}
    faded = seconds["decode"] - 2.0 + 2.0 * math.exp(-2.0 / 60.0)
    both = shares["prefill"] * seconds["prefill"] + shares["decode"] * faded
    assert scene.value('model_flops_utilization{phase="all"}') == pytest.approx(
        both / (seconds["prefill"] + faded)
    )


def test_without_peaks_there_is_no_utilization() -> None:
    scene = Scene(Peaks())
    assert scene.value('estimated_flops_total{phase="decode"}') == 380.0
    assert scene.value("model_flops_utilization") is None
    assert scene.value("memory_bandwidth_utilization") is None


def test_saturation_of_slots_blocks_and_time() -> None:
    scene = Scene(Peaks())
    assert scene.value('saturation_ratio{resource="slots"}') == 0.25
    assert scene.value('saturation_ratio{resource="kv_cache"}') == 0.3
    assert scene.value('saturation_ratio{resource="time"}') == pytest.approx(0.2, abs=0.03)
    scene.now = 1000.0
    assert scene.value('saturation_ratio{resource="time"}') == pytest.approx(0.0, abs=1e-3)
