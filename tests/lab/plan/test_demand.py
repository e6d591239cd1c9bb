from __future__ import annotations

import pytest

from headrace.lab.plan.demand import BadDemand, demand
from headrace.lab.workload import Work


def test_a_workload_in_numbers():
    work = [
        Work("a", tuple(range(100)), max_tokens=10, arrival=1.0),
        Work("b", tuple(range(300, 600)), max_tokens=30, arrival=2.0),
    ]
    told = demand(work, block_size=16)
    assert told.requests_per_second == 1.0
    assert (told.prompt_tokens, told.fresh_tokens, told.output_tokens) == (200, 200, 20)
    assert told.output_tokens_per_second == 20
    assert told.context == (10 * 105 + 30 * 315) / 40
    assert told.longest == 330
    assert (told.prompt_at(0.5), told.prompt_at(0.51), told.prompt_at(1.0)) == (100, 300, 300)
    assert not told.shares_prefixes


def test_what_prompts_share_is_computed_once_in_whole_blocks():
    prefix = tuple(range(40))  # two blocks of 16 and a half
    work = [Work(str(i), (*prefix, 100 + i), 1, arrival=1.0 + i) for i in range(4)]
    assert demand(work, block_size=16).fresh_tokens == 41 - 32 * 3 / 4


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([], "empty"),
        ([Work("a", (1, 2), 4)], "needs a rate"),
        ([Work("a", "text", 4, arrival=1.0)], "request a: .* token ids"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(work, message):
    with pytest.raises(BadDemand, match=message):
        demand(work, 16)
