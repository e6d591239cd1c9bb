"""The steps of small simulations, the guided tour and recordings, as JSON documents and traces, without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.scheduler.routing import LeastLoaded
from headrace.core.tenancy.gate import Limits
from headrace.lab.plan.roofline import BFLOAT16, SHAPES, Replica, device
from headrace.lab.recorded_steps import Camera, RecordedSteps
from headrace.lab.simulate.fleet import Fleet
from headrace.lab.simulate.replica import SimulatedReplica
from headrace.lab.simulate.tally import Tally
from headrace.lab.tour import BLOCK_SIZE, STOPS, BadScenario, Scenario
from headrace.observe.steps.document import document
from headrace.observe.steps.perfetto import trace
from headrace.wiring.simulation import make_replica, roofline_machine

MODEL, DEVICE = "llama-3.1-8b", "H100-SXM"
"""The simulated model and device of the page."""

MOST_STEPS = 1000
"""Maximum steps of a simulation that are returned."""


def simulated_steps(scenario: Scenario, form: str = "json") -> dict[str, Any]:
    """Simulate a scenario; returns its steps as a document for the page, or as a trace (``perfetto``).

    Raises:
        BadScenario: a request does not fit into the blocks.
    """
    needed = -(-scenario.max_model_len // BLOCK_SIZE)
    if needed > scenario.num_blocks:
        raise BadScenario("num_blocks", f"must be at least {needed}: the longest request needs as many")
    drafts = None
    if scenario.num_speculative_tokens:
        config = {
            "method": "ngram",
            "num_speculative_tokens": scenario.num_speculative_tokens,
            "adaptive": False,
        }
        drafts = json.dumps(config)
    replica = Replica(SHAPES[MODEL], device(DEVICE), 1, BFLOAT16)
    cache = CacheOptions(
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=scenario.num_blocks * BLOCK_SIZE * replica.kv_bytes_per_token,
        enable_prefix_caching=scenario.enable_prefix_caching,
    )
    plans = SchedulerOptions(
        scheduling_policy=scenario.scheduling_policy,
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        enable_chunked_prefill=scenario.enable_chunked_prefill,
        speculative_config=drafts,
        overlap=0,
    )
    machine = roofline_machine(replica, cache, plans, scenario.max_model_len)
    tally, answers = Tally(plans.max_num_seqs), dict[str, tuple[int, ...]]()
    engine, runner = make_replica(plans, cache, machine, answers)
    camera = Camera(engine, MOST_STEPS)
    engine_alone = SimulatedReplica(engine, runner, tally, answers, machine.front, camera)
    Fleet([engine_alone], LeastLoaded(), Limits(1 << 62, 1 << 62), tally, answers).run(scenario.simulated())
    if form == "perfetto":
        return trace(camera.records, camera.timelines.items())
    settings = {name: value for name, value in asdict(scenario).items() if name != "requests"}
    settings |= {"block_size": BLOCK_SIZE, "model": MODEL, "device": DEVICE}
    return document("simulation", camera.records, camera.timelines.items(), settings, cut=camera.cut)


def tour() -> list[dict[str, Any]]:
    """The stops of the guided tour as JSON values; each run has the body of a simulation."""
    return [
        {
            "name": stop.name,
            "title": stop.title,
            "text": stop.text,
            "look_at": stop.look_at,
            "runs": [{"caption": caption, "scenario": _body(scenario)} for caption, scenario in stop.runs],
        }
        for stop in STOPS
    ]


def _body(scenario: Scenario) -> dict[str, Any]:
    return asdict(scenario) | {"requests": [asdict(each) for each in scenario.requests]}


def recorded_steps(steps: RecordedSteps) -> dict[str, Any]:
    """The steps of a recording as a document for the page."""
    return document("recording", steps.records, steps.requests(), steps.settings, cut=steps.cut)


def recorded_trace(steps: RecordedSteps) -> dict[str, Any]:
    """The steps of a recording as a trace."""
    return trace(steps.records, steps.requests())
