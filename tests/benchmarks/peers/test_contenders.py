from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.contenders import CONTENDERS, IN_PROCESS, MEANING, Demand
from benchmarks.peers.places import Places

DEMAND = Demand(rows=16, longest=1500, threads=2, kv_token_bytes=1000)


def command(name: str, precision: str = "bf16") -> list[str]:
    return CONTENDERS[name].command(Places(Path("/peers")), Path("model"), 1234, DEMAND, precision)


def test_everyone_who_is_said_to_have_a_precision_can_be_started():
    for contenders in MEANING.values():
        assert contenders.keys() <= {*CONTENDERS, IN_PROCESS}


def test_the_memory_for_keys_and_values_holds_every_row_at_its_longest():
    assert DEMAND.kv_bytes >= 16 * 1500 * 1000
    given = command("llama.cpp")
    assert int(given[given.index("--ctx-size") + 1]) >= 16 * (1500 + 1)


@pytest.mark.parametrize("name", ["headrace", "llama.cpp"])
def test_no_contender_is_given_fewer_rows_than_requests_are_open(name):
    given = command(name)
    assert given[given.index("--max-num-seqs" if name == "headrace" else "--parallel") + 1] == "16"
