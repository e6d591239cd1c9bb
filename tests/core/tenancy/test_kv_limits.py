"""Bounds on KV memory: held requests wait, other tenants do not, and nothing starves."""

from __future__ import annotations

from zlib import crc32

from headrace.core.engine import Engine
from headrace.core.events import Admitted, Finished, Skipped, SkipReason
from headrace.core.knobs import Knobs
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.kv_limits import MAX_PASSES, KvBounds, kv_bounds
from headrace.core.tenancy.tenants import CLASSES, FLEX, KvBound, Tenants, TenantTerms
from headrace.testing.engines import Record, drain, hashing_engine

BOUND = 40


def bounds(
    tenants: dict[str, int | None] | None = None, classes: dict[str, int | None] | None = None
) -> KvBounds:
    return KvBounds(tenants or {}, None, classes or {})


def engine_of(kv: KvBounds, slots: int = 8) -> tuple[Engine, ShareLedger]:
    ledger = ShareLedger(CLASSES, {}, kv)
    engine, _ = hashing_engine(
        num_blocks=400,
        block_size=4,
        max_num_seqs=slots,
        max_model_len=64,
        knobs=Knobs(batched_tokens=256),
        queue=FairQueue(ledger, TenantQueue),
    )
    engine.shares = ledger
    return engine, ledger


def request(
    name: str, tenant: str, output: int = 10, service_class: str = "default", prompt: int = 10
) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    tokens = tuple((crc32(name.encode()) + position) % 97 for position in range(prompt))
    return Request(name, tokens, params, tenant=tenant, service_class=service_class)


def running(engine: Engine) -> set[str]:
    return {name for name, each in engine.scheduler.live.items() if each.slot >= 0}


def test_a_tenant_at_its_bound_waits_and_others_start() -> None:
    engine, _ = engine_of(bounds({"big": BOUND}))
    for number in range(12):  # more than are looked at in one step
        engine.submit(request(f"b{number}", "big"), 0.0)
    for number in range(3):
        engine.submit(request(f"s{number}", "small"), 0.0)
    record = Record()
    record.fold(engine.step(0.0))
    assert running(engine) == {"b0", "b1", "s0", "s1", "s2"}
    assert Skipped("b2", SkipReason.KV_LIMIT) in record.of(Skipped)
    drain(engine, record, 0.0)
    assert {end.reason for end in record.of(Finished)} == {FinishReason.LENGTH}
    assert [each.request_id for each in record.of(Admitted) if each.request_id[0] == "b"] == [
        f"b{number}" for number in range(12)
    ]


def test_the_bound_counts_all_classes_of_a_tenant() -> None:
    engine, _ = engine_of(bounds({"big": BOUND}))
    for number, name in enumerate(("priority", "default", "flex")):
        engine.submit(request(f"b{number}", "big", service_class=name), 0.0)
    engine.step(0.0)
    assert len(running(engine)) == 2


def test_background_work_does_not_count() -> None:
    engine, _ = engine_of(bounds({"big": BOUND}))
    engine.submit(request("w", "big", 30, "background"), 0.0)
    engine.step(0.0)
    assert running(engine) == {"w"}
    for number in range(2):
        engine.submit(request(f"b{number}", "big"), 0.001)
    engine.step(0.001)
    assert {"b0", "b1"} <= running(engine)


def test_a_class_at_its_bound_does_not_hold_up_other_classes() -> None:
    engine, _ = engine_of(bounds(classes={"flex": 20}))
    for number in range(4):
        engine.submit(request(f"f{number}", f"t{number}", service_class="flex"), 0.0)
    engine.submit(request("d", "t0"), 0.0)
    record = Record()
    for step in range(700):  # flex gathers for half a second beside others
        record.fold(engine.step(step / 1000))
        assert len([each for each in running(engine) if each[0] == "f"]) <= 1
    assert {end.reason for end in record.of(Finished)} == {FinishReason.LENGTH}
    assert len(record.of(Finished)) == 5


def test_small_requests_of_a_tenant_pass_a_large_one_so_often_and_no_further() -> None:
    """A stream of small requests in a better class, and one that needs the whole bound."""
    engine, _ = engine_of(bounds({"big": BOUND}))
    record, now, sent = Record(), 0.0, 0
    engine.submit(request("p0", "big", 10, "priority"), now)
    record.fold(engine.step(now))
    engine.submit(request("large", "big", 30), now)
    while not any(each.request_id == "large" for each in record.of(Admitted)):
        sent += 1
        assert sent < 2000
        engine.submit(request(f"s{sent}", "big", 5, "priority", 5), now)
        now += 0.001
        record.fold(engine.step(now))
    started = [each.request_id for each in record.of(Admitted)]
    assert 0 < started.index("large") - 1 <= MAX_PASSES + 3


def test_a_request_that_was_held_back_and_started_in_one_step_does_not_wait() -> None:
    """When ``a`` has ended, the large request starts, and in the same step those that it held back."""
    engine, _ = engine_of(bounds({"big": BOUND}))
    record = Record()
    engine.submit(request("a", "big", 10), 0.0)
    record.fold(engine.step(0.0))
    engine.submit(request("large", "big", 15), 0.0)
    for number in range(2 * MAX_PASSES):
        engine.submit(request(f"s{number}", "big", 1, "priority", 3), 0.0)
    drain(engine, record, 0.0)
    names = [each.request_id for each in record.of(Admitted)]
    behind = names[names.index("large") + 1]
    assert Skipped(behind, SkipReason.KV_LIMIT) in record.events
    for start in record.of(Admitted):
        later = record.events[record.events.index(start) :]
        assert Skipped(start.request_id, SkipReason.KV_LIMIT) not in later


def test_a_request_above_a_bound_that_was_lowered_runs_alone() -> None:
    engine, _ = engine_of(bounds({"big": BOUND}))
    engine.submit(request("a", "big", 30), 0.0)
    engine.set_kv_bounds(bounds({"big": 5}))
    engine.submit(request("b", "big", 30), 0.0)
    engine.step(0.0)
    assert running(engine) == {"a"}
    record = Record()
    drain(engine, record, 0.0)
    assert len(record.of(Finished)) == 2


def test_a_bound_that_is_raised_lets_held_requests_start_at_once() -> None:
    engine, _ = engine_of(bounds({"big": 20}))
    for number in range(3):
        engine.submit(request(f"b{number}", "big"), 0.0)
    engine.step(0.0)
    assert running(engine) == {"b0"}
    engine.set_kv_bounds(bounds({"big": None}))
    engine.step(0.001)
    assert running(engine) == {"b0", "b1", "b2"}


def test_a_held_request_that_is_cancelled_makes_room_for_the_next() -> None:
    engine, _ = engine_of(bounds({"big": BOUND}))
    for name, output in (("a", 10), ("large", 50), ("c", 10)):
        engine.submit(request(name, "big", output), 0.0)
    engine.step(0.0)
    assert running(engine) == {"a"}
    engine.cancel("large", FinishReason.CANCELLED, 0.001)
    engine.step(0.001)
    assert running(engine) == {"a", "c"}


def test_memory_is_counted_exactly_and_idle_tenants_are_forgotten() -> None:
    engine, ledger = engine_of(bounds({"big": BOUND}))
    for number in range(6):
        engine.submit(request(f"b{number}", "big", service_class="flex" if number % 2 else "default"), 0.0)
    record = Record()
    drain(engine, record, 0.0)
    assert all(each.kv.held == 0 for each in ledger.classes.values())
    held = [account.kv.held for each in ledger.classes.values() for account in each.tenants.values()]
    assert not any(held)


def test_a_share_is_of_the_cache_and_the_smaller_of_two_bounds_counts() -> None:
    assert KvBound().of(1000) is None
    assert KvBound(share=0.25).of(1000) == 250
    assert KvBound(400, 0.25).of(1000) == 250
    assert KvBound(100, 0.25).of(1000) == 100
    tenants = Tenants({"a": TenantTerms(kv=KvBound(share=0.5))}, TenantTerms(kv=KvBound(70)))
    found = kv_bounds(tenants, (FLEX,), 100)
    assert (found.of_tenant("a"), found.of_tenant("other"), found.classes) == (50, 70, {"flex": None})
    assert found.any
    assert not kv_bounds(Tenants(), CLASSES, 100).any
