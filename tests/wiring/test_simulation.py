from __future__ import annotations

import dataclasses

import pytest

from headrace.config import CacheOptions, ConfigError, SchedulerOptions
from headrace.lab.plan.roofline import CPU, H100, SHAPES, Replica
from headrace.lab.simulate.runner import StepWork, from_calls
from headrace.lab.simulate.tally import outcome
from headrace.lab.workload.work import Call, Span, Synthesis
from headrace.wiring.simulation import (
    LONGEST,
    calibrated_machine,
    lower_tiers,
    make_fleet,
    read_calibration,
    roofline_machine,
    shape_cost,
    shape_of,
)
from tests.lab.calibration.test_values import CALIBRATION, HOST

LLAMA = SHAPES["llama-3.1-8b"]
SMALL = SHAPES["smollm2-135m"]


def test_memory_is_what_the_weights_leave():
    machine = roofline_machine(Replica(LLAMA, H100), CacheOptions(), SchedulerOptions())
    used = 0.9 * H100.memory_bytes - 8.03e9 * 2
    assert machine.kv_tokens == pytest.approx(used / 131_072, rel=0.05)
    assert machine.kv_tokens % 16 == 0
    assert machine.max_model_len == LONGEST
    half = roofline_machine(
        Replica(LLAMA, H100), CacheOptions(gpu_memory_utilization=0.45), SchedulerOptions()
    )
    assert half.kv_tokens < machine.kv_tokens / 2
    given = roofline_machine(
        Replica(LLAMA, H100), CacheOptions(kv_cache_memory_bytes=131_072 * 1000), SchedulerOptions()
    )
    assert given.kv_tokens == given.max_model_len == 992


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="leave no memory"):
        roofline_machine(Replica(SHAPES["llama-3.1-70b"], H100), CacheOptions(), SchedulerOptions())
    with pytest.raises(ConfigError, match=r"--max-model-len 2000: .* holds 992 tokens"):
        roofline_machine(
            Replica(LLAMA, H100), CacheOptions(kv_cache_memory_bytes=131_072 * 1000), SchedulerOptions(), 2000
        )


def test_memory_for_no_block_is_refused_by_its_name():
    with pytest.raises(
        ConfigError, match=r"--kv-cache-memory-bytes 9: one block of 16 tokens needs 2,097,152 bytes"
    ):
        roofline_machine(Replica(LLAMA, H100), CacheOptions(kv_cache_memory_bytes=9), SchedulerOptions())
    few = dataclasses.replace(CALIBRATION, kv_tokens=1000)
    with pytest.raises(ConfigError, match=r"--block-size 1024: .* has a KV cache of 1000 tokens"):
        calibrated_machine(few, CacheOptions(block_size=1024))


def test_what_is_left_over_of_a_calibrations_memory_is_no_room_for_anybody():
    few = dataclasses.replace(CALIBRATION, kv_tokens=1000, max_model_len=4096)
    machine = calibrated_machine(few, CacheOptions(block_size=16))
    assert machine.kv_tokens == machine.max_model_len == 992
    fleet = make_fleet(SchedulerOptions(), CacheOptions(block_size=16), machine)
    fleet.run(from_calls([Call(0.0, 10, 5)], Synthesis()))
    assert outcome(fleet.tally, {}).failures == {}


def test_a_device_is_never_busy_for_longer_than_the_run_lasts():
    plans = SchedulerOptions(overlap=1)
    machine = roofline_machine(Replica(LLAMA, H100), CacheOptions(), plans, 4096)
    fleet = make_fleet(plans, CacheOptions(), machine)
    fleet.run(from_calls([Call(0.0, 10, 1)], Synthesis()))
    reported = outcome(fleet.tally, {}, [replica.runner.busy_seconds for replica in fleet.replicas])
    assert reported.facts["device_busy_percent"] == pytest.approx(100.0, abs=1.0)
    assert reported.facts["device_busy_percent"] <= 100.0


def test_a_fleet_has_the_engine_that_a_server_would_have():
    plans = SchedulerOptions(max_num_seqs=7)
    machine = roofline_machine(Replica(SMALL, CPU), CacheOptions(), plans, 4096)
    fleet = make_fleet(plans, CacheOptions(), machine, replicas=2)
    engine = fleet.replicas[0].engine
    assert engine.knobs.batched_tokens == 1024, "a CPU's default"
    assert engine.scheduler.max_model_len == 4096
    fleet.run(from_calls([Call(0.0, 50, 5), Call(0.0, 60, 6)], Synthesis()))
    reported = outcome(fleet.tally, {})
    assert (reported.summary.requests, reported.summary.output_tokens) == (2, 11)
    assert all(replica.runner.busy_seconds for replica in fleet.replicas), "both had work"


def test_a_calibration_is_a_machine_too(tmp_path):
    path = tmp_path / "c.json"
    CALIBRATION.write(path)
    calibration = read_calibration(path)
    machine = calibrated_machine(calibration, CacheOptions())
    assert (machine.kv_tokens, machine.max_model_len, machine.kind) == (4096, 2048, "cpu")
    assert machine.front.request_seconds == 0.004
    alone = calibrated_machine(calibration, CacheOptions(), front=False)
    assert alone.front.request_seconds == 0.0
    work = StepWork(4, 4, 4, 4, 4)
    assert alone.device.host_seconds(work) == pytest.approx(HOST[0] + 4 * HOST[1]), "nobody is written to"
    with pytest.raises(ConfigError, match="no such file"):
        read_calibration(tmp_path / "none")
    with pytest.raises(ConfigError, match="which has the size of the KV cache"):
        calibrated_machine(calibration, CacheOptions(kv_cache_memory_bytes=1))


def test_shapes_by_name_or_from_a_config():
    assert shape_of("Llama-3.1-8B") is LLAMA
    builtin = shape_of("builtin")
    assert builtin.num_layers > 0
    assert dataclasses.replace(builtin, name="x") != dataclasses.replace(LLAMA, name="x")
    with pytest.raises(ConfigError, match="shapes known by name are"):
        shape_of("./no-such-folder")


def test_the_simulated_engine_reckons_as_the_real_one():
    from headrace.compute.model.families import parse_config
    from headrace.compute.model.hub import read_config, resolve_folder
    from headrace.wiring.model import decoder_cost

    spec = parse_config(read_config(resolve_folder("builtin")))
    shape = shape_of("builtin")
    assert shape_cost(shape, "cpu").context_tokens == pytest.approx(
        decoder_cost(spec.shape, "cpu").context_tokens, rel=1e-3
    )


def test_a_tenants_weight_is_its_share_in_a_simulation_too(tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {heavy: {weight: 4}}")
    plans = SchedulerOptions(tenants=str(file), max_num_seqs=4)
    calls = [Call(0.0, 200, 50, tenant) for _ in range(40) for tenant in ("heavy", "light")]
    machine = roofline_machine(Replica(LLAMA, H100), CacheOptions(), plans)
    fleet = make_fleet(plans, CacheOptions(), machine)
    fleet.run(from_calls(calls, Synthesis()))
    heavy, light = outcome(fleet.tally, {}).tenants
    assert heavy.ttft.mean < 0.8 * light.ttft.mean


def test_a_host_tier_is_simulated_and_what_is_not_known_is_refused():
    plans, cache = SchedulerOptions(), CacheOptions(kv_offload_bytes=1 << 30)
    machine = roofline_machine(Replica(LLAMA, H100), cache, plans)
    sizes = lower_tiers(cache, machine)
    assert sizes is not None
    assert (sizes.host_blocks, sizes.disk_blocks, sizes.block_bytes) == (512, 0, 16 * 131_072)
    assert sizes.host_bytes_per_second == H100.host_bandwidth
    assert make_fleet(plans, cache, machine).replicas[0].engine.scheduler.pool.lower is not None
    assert lower_tiers(CacheOptions(), machine) is None
    with pytest.raises(ConfigError, match="a disk tier cannot be simulated"):
        lower_tiers(CacheOptions(kv_offload_path="x"), machine)
    with pytest.raises(ConfigError, match="one block needs 2097152"):
        lower_tiers(CacheOptions(kv_offload_bytes=1000), machine)
    with pytest.raises(ConfigError, match=r"the host bandwidth of .* is not known"):
        lower_tiers(cache, calibrated_machine(CALIBRATION, CacheOptions()))


def test_checkpoints_of_states_cost_memory_and_save_steps():
    hybrid = Replica(dataclasses.replace(SMALL, state_bytes=1 << 20), CPU)
    plans = SchedulerOptions(max_num_seqs=2)

    def computed(replica, **given):
        cache = CacheOptions(kv_cache_memory_bytes=1 << 30, **given)
        machine = roofline_machine(replica, cache, plans, 4096)
        fleet = make_fleet(plans, cache, machine)
        calls = [Call(10.0 * turn, 400 * turn, 20, content=(Span(1, 0, 400 * turn),)) for turn in range(1, 6)]
        fleet.run(from_calls(calls, Synthesis()))
        return machine, fleet.tally.computed_tokens

    (dense, known), (machine, cells) = computed(Replica(SMALL, CPU)), computed(hybrid)
    assert dense.state_cells is None
    assert machine.state_cells == 256, "a quarter of a GiB"
    assert machine.kv_tokens == pytest.approx(0.75 * dense.kv_tokens, rel=0.01)
    given, _ = computed(hybrid, state_cache_bytes=3 << 20)
    assert (given.state_cells, given.kv_tokens) == (3, dense.kv_tokens)
    none, whole = computed(hybrid, state_cache_bytes=0)
    assert none.state_cells == 0
    assert 5 * 20 + sum(400 * turn for turn in range(1, 6)) == pytest.approx(whole, rel=0.01)
    assert known <= cells < 0.4 * whole
    with pytest.raises(ConfigError, match=r"--state-cache-bytes: .* has no recurrent states"):
        computed(Replica(SMALL, CPU), state_cache_bytes=1 << 20)
    with pytest.raises(ConfigError, match="states are not sent to other replicas"):
        make_fleet(plans, CacheOptions(kv_offload_bytes=1 << 30), machine, replicas=2, prefill=1)


def test_a_calibration_knows_checkpoints():
    states = dataclasses.replace(CALIBRATION, state_bytes=1 << 20, state_cells=5)
    assert calibrated_machine(CALIBRATION, CacheOptions()).state_cells is None
    for given, cells in (({}, 5), ({"state_cache_bytes": 2 << 20}, 2), ({"enable_prefix_caching": False}, 0)):
        assert calibrated_machine(states, CacheOptions(**given)).state_cells == cells
