"""Agents' sessions against a real server: what is cached of them, and the causes that explanations name."""

from collections.abc import Iterator

import pytest

from tests.judges.agent_prefixes import CASES, MARKERS, Client, causes, evicted, share
from tests.judges.agent_sessions import AGENTS, TEMPLATE, ClaudeCode, Codex
from tests.server.conftest import serving

MEBIBYTE = 2**20


def template(folder) -> str:
    path = folder / "agents.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "tenants.yaml").write_text(
        "tenants:\n" + "".join(f"  {agent.name}: {{normalize: [all]}}\n" for agent in AGENTS)
    )
    flags = ["--chat-template", template(folder), "--tenants", str(folder / "tenants.yaml")]
    with serving(*flags, "--kv-cache-memory-bytes", str(128 * MEBIBYTE)) as server:
        yield Client(server.url)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_nearly_all_of_an_agents_prompts_is_cached_without_its_markers(client, agent):
    turns = client.run(agent(0, MARKERS), agent.name)
    assert share(turns) >= 0.95
    assert all("billing_header=removed" in turn.normalized for turn in turns)
    assert len(turns[-1].prefix["normalized"]) == 4


def test_without_normalization_one_nonce_makes_all_of_it_uncacheable(client):
    turns = client.run(ClaudeCode(0, MARKERS), "unnormalized", 3)
    assert share(turns) < 0.02
    assert {turn.prefix["marker"] for turn in turns[1:]} == {"billing_header"}
    assert client.recomputed()["marker_changed"] > 2_000


def test_without_markers_a_session_is_cached_as_it_is(client):
    turns = client.run(Codex(5), "plain", 4)
    assert share(turns) >= 0.95
    assert {turn.prefix["cause"] for turn in turns[1:]} == {"continues"}


def test_every_planted_cause_is_named(client):
    named = causes(client)
    assert len(named) == len(CASES) + 1
    assert [name for name, found in named.items() if not found] == []


def test_eviction_is_named(tmp_path):
    flags = ["--chat-template", template(tmp_path), "--kv-cache-memory-bytes", str(13 * MEBIBYTE)]
    # On a processor without bfloat16 the default is float32, and half as many tokens fit.
    with serving(*flags, "--dtype", "bfloat16") as server:
        assert evicted(Client(server.url))
