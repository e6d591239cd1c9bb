"""Print the table of coding agents: ``python -m scripts.client_matrix.coding_agents --at FOLDER``.

The agents are packages of npm in FOLDER, installed at the first run. Each gets a home of its own, one prompt, and a
model that plays a script: it reads a file with the agent's own tool, four times, and answers with a word of that file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.events import Admitted, Event
from tests.doubles.scripted_model import scripted_server
from tests.serve.http.tool_scenes import TOOL_TEMPLATE

PROMPT = "MARK-42: read the file note.txt and say which word is in it"
WORD = "gooseberry"
CALLS = 4
SECONDS = 60
WIDE = {
    "max_model_len": 400_000,
    "num_blocks": 400_000,
    "queued_tokens": 5_000_000,
    "max_body_bytes": 20_000_000,
}


class Agent(NamedTuple):
    """A program of a package, and how it is set up.

    ``call`` makes the name and the arguments of the call that reads a file. ``environment`` and ``files`` (paths in
    the home folder) may contain ``@URL@``, that of the API, and ``@ROOT@``, the same without ``/v1``. The program runs
    in the folder ``work`` of its home.
    """

    title: str
    package: str
    command: Sequence[str]
    call: Callable[[Path], tuple[str, dict[str, Any]]]
    environment: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


def _provider(**more: Any) -> dict[str, Any]:
    return {"headrace": more}


AGENTS = (
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        ("claude", "-p", PROMPT, "--model", "fox"),
        lambda note: ("Read", {"file_path": str(note)}),
        {
            "ANTHROPIC_BASE_URL": "@ROOT@",
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent(
        "Codex",
        "@openai/codex",
        ("codex", "exec", "--skip-git-repo-check", PROMPT),
        lambda note: ("exec_command", {"cmd": f"cat {note}"}),
        files={
            ".codex/config.toml": 'model = "fox"\nmodel_provider = "headrace"\n[model_providers.headrace]\n'
            'name = "Headrace"\nbase_url = "@URL@"\nwire_api = "responses"\n'
        },
    ),
    Agent(
        "opencode",
        "opencode-ai",
        ("opencode", "run", PROMPT),
        lambda note: ("read", {"filePath": str(note)}),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {
            "work/opencode.json": json.dumps(
                {
                    "model": "headrace/fox",
                    "small_model": "headrace/fox",
                    "provider": _provider(
                        npm="@ai-sdk/openai-compatible",
                        name="Headrace",
                        options={"baseURL": "@URL@", "apiKey": "none"},
                        models={"fox": {"name": "fox", "limit": {"context": 200_000, "output": 4096}}},
                    ),
                }
            )
        },
    ),
    Agent(
        "Qwen Code",
        "@qwen-code/qwen-code",
        ("qwen", "-p", PROMPT, "--auth-type", "openai", "-y"),
        lambda note: ("read_file", {"file_path": str(note), "absolute_path": str(note)}),
        {"OPENAI_BASE_URL": "@URL@", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "fox"},
    ),
    Agent(
        "pi",
        "@mariozechner/pi-coding-agent",
        ("pi", "--offline", "--provider", "headrace", "--model", "fox", "-p", PROMPT),
        lambda note: ("read", {"path": str(note)}),
        files={
            ".pi/agent/models.json": json.dumps(
                {
                    "providers": _provider(
                        baseUrl="@URL@",
                        api="openai-completions",
                        apiKey="none",
                        models=[{"id": "fox", "contextWindow": 200_000, "maxTokens": 4096}],
                    )
                }
            )
        },
    ),
)


class Outcome(NamedTuple):
    """Whether the answer came, the prompts that had the task, and what is cached of them from the second one on."""

    answered: bool
    turns: int
    cached: float


def script(name: str, arguments: dict[str, Any]) -> Callable[[str], str]:
    """What the model says: calls until there are enough results, then the word, if a result has it."""
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def say(prompt: str) -> str:
        text = "A task."
        if PROMPT[:7] in prompt and "[tools]" in prompt:
            results = re.findall(r"\n\[tool\].*", prompt)
            found = any(WORD in each for each in prompt.split("\n[tool]")[1:])
            text = (
                f"Look.\n{call}" if len(results) < CALLS else f"The word is {WORD if found else 'unknown'}."
            )
        return f"Hm.</think>{text}" if prompt.rstrip().endswith("<think>") else text

    return say


def run(agent: Agent, programs: Path) -> Outcome:
    """Let one agent do its task."""
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder), Path(folder) / "work"
        work.mkdir()
        note = work / "note.txt"
        note.write_text(f"{WORD}\n")
        with scripted_server(script(*agent.call(note)), template=TOOL_TEMPLATE, **WIDE) as server:

            def told(text: str) -> str:
                return text.replace("@URL@", server.url).replace("@ROOT@", server.url.removesuffix("/v1"))

            for path, text in agent.files.items():
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(told(text))
            environment = {**os.environ, "HOME": str(home)}
            environment |= {name: told(value) for name, value in agent.environment.items()}
            command = [str(programs / agent.command[0]), *agent.command[1:]]
            said = output_of(command, work, environment)
            turns = shares(server.events)
        cached = sum(part for _, part in turns[1:]) / max(1, sum(whole for whole, _ in turns[1:]))
        return Outcome(f"The word is {WORD}" in said, len(turns), cached)


def output_of(command: Sequence[str], work: Path, environment: Mapping[str, str]) -> str:
    """What a program prints, which may be told to end before it does so itself."""
    with subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as program:
        try:
            said, _ = program.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            program.terminate()
            said, _ = program.communicate()
    return said.decode(errors="replace")


def shares(events: Sequence[Event]) -> list[tuple[int, int]]:
    """The tokens of each prompt of the agent's main loop, and how many of them were cached."""
    told = [(e.known_tokens, e.cached_tokens) for e in events if isinstance(e, Admitted)]
    longest = max((whole for whole, _ in told), default=0)
    return [(whole, part) for whole, part in told if whole > longest / 2]


def version(programs: Path, package: str) -> str:
    """The installed version of a package."""
    text = (programs.parent / package / "package.json").read_text(encoding="utf-8")
    return str(json.loads(text)["version"])


def main() -> None:
    """Install what is missing, run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, required=True, help="folder of the packages")
    at: Path = parser.parse_args().at
    programs = at / "node_modules" / ".bin"
    if missing := [agent.package for agent in AGENTS if not (programs.parent / agent.package).exists()]:
        at.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", *missing], cwd=at, check=True)
    print("| agent | version | loop | turns | cached from the second turn on |\n|---|---|---|---|---|")
    for agent in AGENTS:
        outcome = run(agent, programs)
        cells = ("pass" if outcome.answered else "FAIL", outcome.turns, f"{outcome.cached:.1%}")
        print(
            f"| {agent.title} | {version(programs, agent.package)} | {' | '.join(map(str, cells))} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
