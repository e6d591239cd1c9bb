"""A state machine over the engine: hypothesis picks what happens, and shrinks what goes wrong."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.core.knobs import Knobs
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import expected_tokens

SIZES = st.integers(1, 4)


class Life(RuleBasedStateMachine):
    """Requests over an alphabet of three tokens, so that prefixes meet all the time."""

    @initialize(
        block_size=SIZES,
        spare=st.integers(0, 8),
        slots=SIZES,
        overlap=st.integers(0, 2),
        budget=st.integers(1, 12),
        sharing=st.booleans(),
        host=st.sampled_from([0, 0, 1, 6]),
        disk=st.sampled_from([0, 3, 20]),
    )
    def begin(self, block_size, spare, slots, overlap, budget, sharing, host, disk):
        self.engine, self.runner = hashing_engine(
            num_blocks=-(-16 // block_size) + spare,
            block_size=block_size,
            max_num_seqs=slots,
            max_model_len=16,
            overlap=overlap,
            knobs=Knobs(batched_tokens=budget, max_skips=2),
            prefix_caching=sharing,
            host_blocks=host,
            disk_blocks=disk if host else 0,
        )
        self.record = Record()
        self.requests: dict[str, Request] = {}
        self.disturbed: set[str] = set()
        self.now = 0.0

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=15),
        length=st.integers(1, 8),
        salt=st.sampled_from(["", "a"]),
        deadline=st.none() | st.floats(0.0, 0.02),
    )
    def submit(self, tokens, length, salt, deadline):
        request = Request(
            f"r{len(self.requests)}",
            tuple(tokens),
            SamplingParams(max_tokens=length),
            arrived=self.now,
            salt=salt,
            deadline=None if deadline is None else self.now + deadline,
        )
        self.requests[request.id] = request
        if deadline is not None:
            self.disturbed.add(request.id)
        self.engine.submit(request, self.now)

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.now += 0.001
            self.record.fold(self.engine.step(self.now))

    @rule(number=st.integers(0, 20), why=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]))
    def cancel(self, number, why):
        self.engine.cancel(f"r{number}", why, self.now)
        self.disturbed.add(f"r{number}")

    @rule(number=st.integers(0, 20))
    def fail(self, number):
        self.runner.poison.add(f"r{number}")
        self.disturbed.add(f"r{number}")

    @rule(broken=st.booleans())
    def break_the_disk(self, broken):
        self.runner.breaks = lambda move: broken

    @rule()
    def reset(self):
        self.engine.reset_prefix_cache()

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "engine"):
            self.engine.check_consistency()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        drain(self.engine, self.record, self.now, max_steps=5000)
        pool = self.engine.scheduler.pool
        assert pool.num_free == pool.num_blocks
        assert not pool._announced
        assert self.record.ends.keys() == self.requests.keys()
        for name, request in self.requests.items():
            (end,) = self.record.ends[name]
            limit = min(request.params.max_tokens, 16 - len(request.tokens))
            want = expected_tokens(request.tokens, 0, limit, frozenset())
            got = self.record.tokens.get(name, [])
            assert got == want[: len(got)]
            if name not in self.disturbed:
                assert (end.reason, got) == (FinishReason.LENGTH, want)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=300,
    stateful_step_count=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
