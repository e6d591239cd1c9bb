from __future__ import annotations

from dataclasses import replace

from headrace.config import SchedulerOptions
from headrace.core.knobs import Knobs
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.tenancy.tenants import CLASSES
from headrace.wiring.engine import has_patience, make_order
from tests.doubles.scenes import request


def test_the_order_of_the_queue_follows_its_knob():
    starts = LatestStarts(StepTimes(), LengthPredictor(1000), {each.name: each for each in CLASSES})
    knobs = Knobs()
    order = make_order(SchedulerOptions(), starts, lambda: knobs)
    long, short = request("long", 900, arrived=0.0), request("short", 9, arrived=0.5)
    assert order.rank(long, 1) < order.rank(short, 2)
    knobs = replace(knobs, queue_patience=4.0)
    assert order.rank(long, 1) > order.rank(short, 2)


def test_only_the_fair_queue_has_patience():
    assert has_patience(SchedulerOptions(queue_order="prefix"))
    assert not has_patience(SchedulerOptions(scheduling_policy="fcfs"))
    assert not has_patience(SchedulerOptions(queue_order="my_package:MyOrder"))
