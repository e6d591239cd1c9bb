"""A model answers requests of every kind of step before those of clients, and keeps nothing of them."""

from __future__ import annotations

import pytest

from headrace import LLM
from headrace.wiring.first_requests import answer, groups


def test_one_request_is_enough_where_nothing_is_compiled() -> None:
    assert [len(group) for group in groups(False, 1000)] == [1]


@pytest.mark.parametrize(("longest", "kinds"), [(4096, 7), (32, 6)])
def test_requests_fit_the_context(longest: int, kinds: int) -> None:
    made = groups(True, longest)
    assert len(made) == kinds
    assert max(len(request.tokens) for group in made for request in group) == min(1100, longest - 2)
    names = [request.id for group in made for request in group]
    assert len(set(names)) == len(names)


def test_all_of_them_are_answered_and_leave_no_block() -> None:
    llm = LLM("builtin", device="cpu", max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=4 << 20)
    engine = llm.loaded.engine
    answer(engine, groups(True, 128))
    engine.check_consistency()
    assert engine.wake_at(0.0) is None
