"""How much of agents' prompts is cached, and whether causes are named: ``python -m tests.judges.agent_prefixes``.

Sessions of `tests.judges.agent_sessions` run against real servers: once without per-request markers, once with them,
and once with them and ``--normalize-prompts all``. The share is that of prompt tokens from the second turn on. Then one
cause after the other is planted, and the explanation of the request that it hits must name it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.stage import arguments, publish, say, server
from tests.judges.agent_sessions import (
    AGENTS,
    MIDDLE,
    TEMPLATE,
    TURNS,
    AgentSession,
    ClaudeCode,
    Codex,
    OpenCode,
)

MARKERS = frozenset({"nonce", "budget", "date", "git"})
ROOMY, NARROW = str(96 << 20), str(13 << 20)
"""Bytes of KV memory in bfloat16: for all sessions of a run, and for one session and a half."""


class TurnResult(NamedTuple):
    """A turn: its prompt, and where it left the cached prefix."""

    prompt_tokens: int
    cached_tokens: int
    prefix: dict[str, Any]
    normalized: str


class Case(NamedTuple):
    """A planted cause: the session, the turn that it hits, and what the explanation must say."""

    name: str
    agent: type[AgentSession]
    planted: str
    turn: int
    cause: str
    marker: str | None = None


CASES = (
    Case("nonce", ClaudeCode, "nonce", 1, "marker_changed", "billing_header"),
    Case("token budget", OpenCode, "budget", 1, "marker_changed", "total_tokens"),
    Case("date line", OpenCode, "date", MIDDLE, "marker_changed", "current_date"),
    Case("git status", ClaudeCode, "git", MIDDLE, "marker_changed", "git_status"),
    Case("reordered tools", Codex, "tools", MIDDLE, "tools_reordered"),
    Case("reasoning dropped by the template", OpenCode, "reasoning", MIDDLE, "reasoning_dropped"),
)


class Client:
    """Sends the turns of sessions; each tenant by its name."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300.0, trust_env=False)
        self._sent = 0

    def turn(self, session: AgentSession, tenant: str) -> TurnResult:
        """Send the next turn of a session, and take its answer."""
        self._sent += 1
        id = f"turn-{self._sent}"
        headers = {"X-Tenant-Id": tenant, "X-Request-Id": id}
        answer = self._http.post(session.path, json=session.body(), headers=headers)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(answer.text)
        explained = self._http.get(f"/v1/requests/{id}", headers={"X-Tenant-Id": tenant}).json()
        session.answered(answer.json())
        normalized = answer.headers.get("X-Headrace-Normalized", "")
        return TurnResult(
            explained["prompt_tokens"], explained["cached_tokens"], explained["prefix"], normalized
        )

    def run(self, session: AgentSession, tenant: str, turns: int = TURNS) -> list[TurnResult]:
        """The first turns of a session."""
        return [self.turn(session, tenant) for _ in range(turns)]

    def recomputed(self) -> dict[str, float]:
        """Tokens computed again, by cause."""
        name = "headrace:prefix_recomputed_tokens_total{"
        lines = [line for line in self._http.get("/metrics").text.splitlines() if line.startswith(name)]
        return {line.split('cause="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


@contextmanager
def serving(args: Any, *flags: str, memory: str = ROOMY) -> Iterator[Client]:
    """A server with the agents' chat template."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "agents.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        given = ("--dtype", "bfloat16", "--kv-cache-memory-bytes", memory, "--chat-template", str(template))
        with server(args, *given, *flags) as running:
            yield Client(running.url)


def share(turns: Sequence[TurnResult]) -> float:
    """The share of prompt tokens that were cached, from the second turn on."""
    later = turns[1:]
    return sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later)


def shares(client: Client, planted: frozenset[str], seed: int = 0) -> dict[str, float]:
    """The share of each agent's session; each agent is a tenant of its own."""
    return {
        agent.name: share(client.run(agent(seed, planted), "-".join((agent.name, *sorted(planted)))))
        for agent in AGENTS
    }


def causes(client: Client) -> dict[str, bool]:
    """Whether each planted cause is named, on a server with room for all."""
    named = {}
    for case in CASES:
        session = case.agent(1, frozenset({case.planted}))
        found = client.run(session, case.name, case.turn + 1)[-1].prefix
        named[case.name] = (found["cause"], found["marker"]) == (case.cause, case.marker)
        say(
            f"{case.name}: {found['cause']} {found['marker'] or ''} at {found['left_at_token']}, {found['section']}"
        )
    other = client.run(Codex(1), "another tenant", 1)[0].prefix
    named["other tenant"] = other["cause"] == "other_tenant"
    return named


def evicted(client: Client) -> bool:
    """Whether eviction is named: another tenant's sessions use all memory between two turns."""
    session = ClaudeCode(3)
    client.run(session, "mine", 2)
    for seed in range(2):
        client.run(Codex(seed, rules=80), f"theirs {seed}", 1)
    found = client.turn(session, "mine").prefix
    return bool(found["cause"] == "evicted" and found["recomputed_tokens"] > 0)


def main() -> None:
    """Runs the sessions and reports shares and causes."""
    args = arguments(__doc__.split("\n")[0] if __doc__ else "").parse_args()
    result: dict[str, Any] = {}
    with serving(args) as client:
        result["without markers"] = shares(client, frozenset(), args.seed)
        result["with markers"] = shares(client, MARKERS, args.seed)
        result["recomputed tokens"] = client.recomputed()
        result["named"] = causes(client)
    with serving(args, "--normalize-prompts", "all") as client:
        result["with markers, normalized"] = shares(client, MARKERS, args.seed)
        result["recomputed tokens, normalized"] = client.recomputed()
    with serving(args, memory=NARROW) as client:
        result["named"]["evicted"] = evicted(client)
    for name, found in result.items():
        say(name)
        for key, value in found.items():
            say(f"  {key}: {value:.1%}" if isinstance(value, float) and value <= 1 else f"  {key}: {value}")
    publish("agent_prefixes", args, [], [], result=result)


if __name__ == "__main__":
    main()
