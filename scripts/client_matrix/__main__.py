"""Print the table of client libraries: ``python -m scripts.client_matrix --at FOLDER``.

Each Python library gets a virtual environment of its own under FOLDER, and the node libraries share one folder there;
both are made at the first run. A program that ends without a line for a case has failed it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.api.tool_scenes import TOOL_TEMPLATE
from tests.doubles.grammars import Compiled
from tests.doubles.scripted_model import scripted_server
from tests.server.conftest import serving

HERE = Path(__file__).parent
CASES = ("chat", "stream", "structured", "tool")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "It is 21 degrees in Paris."
NODE_PACKAGES = (
    "openai",
    "@anthropic-ai/sdk",
    "ai",
    "@ai-sdk/openai",
    "@ai-sdk/openai-compatible",
    "@ai-sdk/anthropic",
    "@openai/agents",
    "@langchain/core",
    "@langchain/openai",
    "@langchain/anthropic",
    "@langchain/langgraph",
    "zod",
)
PROGRAM_SECONDS = 300


ENVIRONMENTS = {
    "official": ("openai", "anthropic"),
    "langchain": ("langchain-openai", "langchain-anthropic", "langgraph"),
    "llama-index": ("llama-index-llms-openai-like",),
    "litellm": ("litellm",),
    "pydantic": ("pydantic-ai-slim[openai,anthropic]",),
    "instructor": ("instructor", "anthropic"),
    "agents": ("openai-agents",),
    "haystack": ("haystack-ai",),
    "semkernel": ("semantic-kernel",),
    "agno": ("agno", "openai", "anthropic"),
    "strands": ("strands-agents[openai,anthropic]",),
}
"""Python packages of each virtual environment; they want different versions of the same clients."""


class Client(NamedTuple):
    """One row of the table: a program, its argument, and its Python environment; none for node."""

    title: str
    program: str
    dialect: str = ""
    environment: str = ""


CLIENTS = (
    Client("openai (Python), chat completions", "openai_chat", "", "official"),
    Client("openai (Python), Responses", "openai_responses", "", "official"),
    Client("anthropic (Python)", "anthropic_messages", "", "official"),
    Client("langchain-openai, chat completions", "langchain", "chat", "langchain"),
    Client("langchain-openai, Responses", "langchain", "responses", "langchain"),
    Client("langchain-anthropic", "langchain", "anthropic", "langchain"),
    Client("llama-index, OpenAILike", "llama_index_like", "", "llama-index"),
    Client("litellm, providers openai, hosted_vllm and anthropic", "litellm_sdk", "", "litellm"),
    Client("pydantic-ai, chat completions", "pydantic_ai_agent", "chat", "pydantic"),
    Client("pydantic-ai, Responses", "pydantic_ai_agent", "responses", "pydantic"),
    Client("pydantic-ai, Anthropic", "pydantic_ai_agent", "anthropic", "pydantic"),
    Client("instructor, OpenAI's and Anthropic's client", "instructor_modes", "", "instructor"),
    Client("openai-agents (Python), chat completions", "openai_agents", "chat", "agents"),
    Client("openai-agents (Python), Responses", "openai_agents", "responses", "agents"),
    Client("haystack", "haystack_chat", "", "haystack"),
    Client("semantic-kernel", "semantic_kernel_chat", "", "semkernel"),
    Client("agno, OpenAILike", "agno_agent", "chat", "agno"),
    Client("agno, Responses", "agno_agent", "responses", "agno"),
    Client("agno, Anthropic", "agno_agent", "anthropic", "agno"),
    Client("strands-agents, OpenAI", "strands_agent", "chat", "strands"),
    Client("strands-agents, Anthropic", "strands_agent", "anthropic", "strands"),
    Client("openai (node), chat completions", "openai_chat", "chat"),
    Client("openai (node), Responses", "openai_chat", "responses"),
    Client("@anthropic-ai/sdk (node)", "anthropic_messages"),
    Client("Vercel AI SDK, @ai-sdk/openai (Responses)", "ai_sdk", "openai"),
    Client("Vercel AI SDK, @ai-sdk/openai (chat)", "ai_sdk", "openai-chat"),
    Client("Vercel AI SDK, @ai-sdk/openai-compatible", "ai_sdk", "compatible"),
    Client("Vercel AI SDK, @ai-sdk/anthropic", "ai_sdk", "anthropic"),
    Client("@openai/agents (node), chat completions", "openai_agents", "chat"),
    Client("@openai/agents (node), Responses", "openai_agents", "responses"),
    Client("@langchain/openai (node), chat completions", "langchain", "chat"),
    Client("@langchain/openai (node), Responses", "langchain", "responses"),
    Client("@langchain/anthropic (node)", "langchain", "anthropic"),
)


def say(prompt: str) -> str:
    """The script: call the tool, and answer once its result is in the prompt."""
    return ANSWER if "degrees" in prompt else CALL


def python_of(environment: str, folder: Path) -> Path:
    """The interpreter of a virtual environment, which is made if it is missing."""
    place = folder / environment
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *ENVIRONMENTS[environment]], check=True)
    return python


def node_folder(folder: Path) -> Path:
    """The folder of the node libraries, with this version of the programs."""
    place = folder / "node"
    if not (place / "node_modules").exists():
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "init", "-y"], cwd=place, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["npm", "install", *NODE_PACKAGES], cwd=place, check=True)
    for program in (HERE / "node").glob("*.mjs"):
        (place / program.name).write_bytes(program.read_bytes())
    return place


def outcomes(client: Client, folder: Path, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """What became of each case, by its name."""
    if client.environment:
        command, cwd = (
            [python_of(client.environment, folder), HERE / "python" / f"{client.program}.py"],
            folder,
        )
    else:
        cwd = node_folder(folder)
        command = ["node", f"{client.program}.mjs"]
    environment = os.environ | {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "DO_NOT_TRACK": "1"}
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        [*command, *arguments, client.dialect],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    told = {line["case"]: line for line in lines}
    if any(line["reason"] for line in lines) or set(told) != set(CASES):
        print(ran.stderr[-6000:], file=sys.stderr)
    return told


def row(client: Client, told: dict[str, dict[str, Any]]) -> str:
    """A line of the table."""
    version = next((line["version"] for line in told.values()), "")
    missing = {"reason": "the program ended before it"}
    cells = [told.get(case, missing)["reason"] or "pass" for case in CASES]
    return f"| {client.title} | {version} | " + " | ".join(cells) + " |"


def main() -> None:
    """Run all programs, or those whose title has ``--only`` in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, required=True, help="folder of the environments")
    parser.add_argument("--only", default="", help="a part of the titles to run")
    given = parser.parse_args()
    folder = given.at.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "tools.jinja"
    template.write_text(TOOL_TEMPLATE, encoding="utf-8")
    print("| client | version | " + " | ".join(CASES) + " |")
    print("|---|---|" + "---|" * len(CASES))
    with (
        serving("--chat-template", str(template)) as builtin,
        scripted_server(say, template=TOOL_TEMPLATE, grammars=Compiled()) as scripted,
    ):
        arguments = [builtin.url, "builtin", scripted.url.removesuffix("/v1"), "fox"]
        for client in CLIENTS:
            if given.only in client.title:
                print(row(client, outcomes(client, folder, arguments)), flush=True)


if __name__ == "__main__":
    main()
