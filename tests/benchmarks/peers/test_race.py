from __future__ import annotations

from pathlib import Path

from benchmarks.peers.contenders import IN_PROCESS, Demand
from benchmarks.peers.places import Places
from benchmarks.peers.race import Race, _target
from benchmarks.peers.workloads import workload


def test_padded_batches_are_raced_in_the_closed_loop_that_servers_have(monkeypatch):
    asked: dict[str, object] = {}
    monkeypatch.setattr(
        "headrace.lab.bench.static_batching.TransformersStatic", lambda *_, **given: asked.update(given)
    )
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    race = Race("smollm2-135m", "bf16", workload("prefill"), [IN_PROCESS], 1, 1, Places(Path("/peers")))
    _target(IN_PROCESS, race, Path("model"), Demand(1, 2049, 1, 1000))
    assert asked["closed"] is True
