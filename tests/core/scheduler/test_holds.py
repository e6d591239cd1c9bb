"""A request whose grammar is being compiled waits, and holds nobody up."""

from headrace.core.events import Finished, Skipped, SkipReason
from headrace.core.knobs import Knobs
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler.admitter import LOOKAHEAD
from headrace.core.scheduler.holds import HOLD_SECONDS, UntilCompiled
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import hashing_engine
from tests.doubles.grammars import Compiling

CONSTRAINED = SamplingParams(max_tokens=4, structured_outputs={"regex": "a+"})


class Broken:
    def hold(self, request):
        raise RuntimeError("no idea")


def engine_of(holds):
    engine, _ = hashing_engine(holds=holds)
    return engine


def request(name, params):
    return Request(name, (1, 2, 3), params)


def run(engine, steps, now=0.0):
    events = []
    for _ in range(steps):
        events += engine.step(now)
        now += 0.01
    return events


def finished(events):
    return {event.request_id: event for event in events if isinstance(event, Finished)}


def test_it_waits_without_stalling_and_starts_when_the_grammar_is_there():
    grammars = Compiling()
    engine = engine_of(UntilCompiled(grammars))
    engine.submit(request("a", CONSTRAINED), 0.0)
    events = run(engine, 3)
    assert Skipped("a", SkipReason.GRAMMAR_COMPILING) in events
    assert not finished(events)
    assert engine.wake_at(0.02) == 0.02 + HOLD_SECONDS
    grammars.done = True
    events = run(engine, 8, 1.0)
    assert finished(events)["a"].reason is FinishReason.LENGTH
    engine.check_consistency()


def test_others_pass_it_and_are_not_counted_as_overtaking():
    grammars = Compiling()
    engine = engine_of(UntilCompiled(grammars))
    engine.submit(request("held", CONSTRAINED), 0.0)
    for number in range(40):
        engine.submit(request(f"free-{number}", SamplingParams(max_tokens=2)), 0.0)
    events = run(engine, 60)
    assert len(finished(events)) == 40
    grammars.done = True
    assert "held" in finished(run(engine, 8, 1.0))


def test_many_that_wait_for_grammars_do_not_block_those_behind_them():
    grammars = Compiling()
    engine = engine_of(UntilCompiled(grammars))
    for number in range(3 * LOOKAHEAD):
        engine.submit(request(f"held-{number}", CONSTRAINED), 0.0)
    engine.submit(request("free", SamplingParams(max_tokens=2)), 0.0)
    assert finished(run(engine, 6)).keys() == {"free"}
    grammars.done = True
    assert len(finished(run(engine, 40, 1.0))) == 3 * LOOKAHEAD
    engine.check_consistency()


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone():
    grammars = Compiling("the regex is too large")
    grammars.done = True
    engine = engine_of(UntilCompiled(grammars))
    engine.submit(request("bad", CONSTRAINED), 0.0)
    engine.submit(request("good", SamplingParams(max_tokens=2)), 0.0)
    ends = finished(run(engine, 8))
    assert ends["bad"].reason is FinishReason.FAILED
    assert ends["bad"].message == "structured output failed: the regex is too large"
    assert ends["good"].reason is FinishReason.LENGTH


def test_a_policy_that_fails_fails_the_request_that_it_was_asked_for():
    engine = engine_of(Broken())
    engine.submit(request("a", CONSTRAINED), 0.0)
    assert "hold policy failed" in finished(run(engine, 2))["a"].message
    engine.check_consistency()


def test_it_may_be_cancelled_while_it_waits():
    engine = engine_of(UntilCompiled(Compiling()))
    engine.submit(request("a", CONSTRAINED), 0.0)
    run(engine, 1)
    engine.cancel("a", FinishReason.CANCELLED, 0.1)
    assert finished(engine.step(0.1))["a"].reason is FinishReason.CANCELLED
    assert engine.wake_at(0.2) is None


def test_many_held_requests_of_two_tenants_are_no_stall():
    """The head that is looked at after a step need not be one that was held in it."""
    grammars = Compiling()
    queue = FairQueue(ShareLedger(CLASSES, {}), TenantQueue)
    engine, _ = hashing_engine(holds=UntilCompiled(grammars), queue=queue, knobs=Knobs(max_skips=0))
    for number in range(20):
        tenant = "ab"[number % 2]
        engine.submit(Request(f"r{number}", (1, 2, number), CONSTRAINED, tenant=tenant), 0.0)
    run(engine, 10)
    assert engine.wake_at(0.09) == 0.09 + HOLD_SECONDS
    grammars.done = True
    assert len(finished(run(engine, 40, 1.0))) == 20
    engine.check_consistency()


def test_a_request_held_before_the_step_was_full_wakes_the_engine():
    """A step looks at the queue before each prompt of another tenant and once more at the end, here without budget."""
    grammars = Compiling()
    queue = FairQueue(ShareLedger(CLASSES, {}), TenantQueue)
    engine, _ = hashing_engine(holds=UntilCompiled(grammars), queue=queue, knobs=Knobs(batched_tokens=4))
    for name in ("first", "second"):
        engine.submit(Request(name, (1,), SamplingParams(max_tokens=2), tenant="a"), 0.0)
    engine.submit(Request("prompt", (1, 2, 3, 4), SamplingParams(max_tokens=1), tenant="a"), 0.0)
    engine.submit(Request("held", (5,), CONSTRAINED, tenant="b"), 0.0)
    assert not finished(run(engine, 1))
    assert finished(run(engine, 1, 0.01)).keys() == {"first", "second", "prompt"}
    assert engine.wake_at(0.01) == 0.01 + HOLD_SECONDS
    grammars.done = True
    assert finished(run(engine, 8, 1.0)).keys() == {"held"}
    engine.check_consistency()
