"""Sessions of coding agents as their clients write them: Claude Code (Messages), Codex (Responses), opencode (chat).

Each has a system prompt and tools of thousands of tokens, calls a tool in every turn, and sends the whole conversation
again. The server's own answers become part of it. What changes by request is switched on by name:

| name | what |
|---|---|
| ``nonce`` | a billing header with a nonce as the first system block |
| ``budget`` | the remaining token budget, appended to the system prompt at each turn; older ones stay |
| ``date`` | a date line in the system prompt that changes in the middle of the session |
| ``git`` | a git status in the system prompt that changes in the middle of the session |
| ``tools`` | the tools in another order from the middle of the session on |
| ``reasoning`` | answers with reasoning that the chat template drops at the user's next message |
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from typing import Any

TURNS = 12
MIDDLE = TURNS // 2

TEMPLATE = (
    "{{ bos_token }}<|system|>"
    "{% for m in messages if m.role == 'system' %}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}\n{% endfor %}{% endif %}\n{% endfor %}"
    "{% if tools %}# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    'Call as <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>{% endif %}<|end|>'
    "{% set last = namespace(at=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'assistant' %}<|assistant|>"
    "{% if m.reasoning_content and loop.index0 + (messages | selectattr('role', 'equalto', 'system') | list"
    " | length) > last.at %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{% endif %}"
    "{% else %}{{ '<|tool|>' if m.role == 'tool' else '<|user|>' }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.text }}\n{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or () %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template with tools that drops reasoning before the last user message, as Qwen3's does."""

_RULES = (
    "Prefer small changes that a reviewer can read in one sitting; explain each in one sentence.",
    "Read a file before you edit it, and read it again if a tool has changed it.",
    "Never print secrets, and never write keys to a file that is under version control.",
    "Run the tests that belong to the changed files, and report what failed with the first error.",
    "Do not add a dependency without asking; if one is needed, say which and why.",
    "Keep the style of the surrounding code: its names, its quotes, its length of lines.",
    "If a command may destroy data, show it first and wait for a confirmation.",
    "When a search finds nothing, say so and try another word before you give up.",
)
_TOOLS = (
    (
        "Read",
        "Reads a file from the disk. Lines longer than 2000 characters are cut.",
        ("path", "offset", "limit"),
    ),
    ("Edit", "Replaces one exact text in a file by another one.", ("path", "old_text", "new_text")),
    ("Write", "Writes a file, in place of the one that is there.", ("path", "content")),
    ("Bash", "Runs a command in a shell and returns its output.", ("command", "timeout", "description")),
    ("Grep", "Searches files for a regular expression.", ("pattern", "path", "glob")),
    ("Glob", "Lists the files that match a pattern, newest first.", ("pattern", "path")),
    ("Task", "Starts a helper with a task of its own and returns its report.", ("description", "prompt")),
    ("WebFetch", "Fetches a page and returns its text.", ("url", "prompt")),
)


def _rules(name: str, count: int) -> str:
    lines = [f"{n + 1}. {_RULES[n % len(_RULES)]} (rule {n + 1} of {name})" for n in range(count)]
    return "\n".join((f"You are {name}, an agent that works on a repository.", "", "# Rules", *lines))


def _tools() -> list[dict[str, Any]]:
    """Functions as OpenAI's chat spells them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": about,
                "parameters": {
                    "type": "object",
                    "properties": {
                        field: {"type": "string", "description": f"The {field} for {name}, as text."}
                        for field in fields
                    },
                    "required": list(fields[:1]),
                },
            },
        }
        for name, about, fields in _TOOLS
    ]


class AgentSession(ABC):
    """One session. `body` is the next request, `answered` takes its response; ``planted`` are names of the table."""

    path = ""
    name = ""

    def __init__(self, seed: int = 0, planted: frozenset[str] = frozenset(), rules: int = 60) -> None:
        self.planted = planted
        self.turn = 0
        self._random = random.Random(f"{self.name} {seed}")
        self._nonces = random.Random(f"nonces {self.name} {seed}")
        self._rules = _rules(self.name, rules)
        self._task = (
            f"Task {seed}: rename the option --verbose to --log-level everywhere, and keep the tests green."
        )

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The next request."""

    @abstractmethod
    def answered(self, response: dict[str, Any]) -> None:
        """Add the answer, the tool that it calls and what that returns."""

    def _call(self) -> tuple[str, dict[str, str], str]:
        """The tool of this turn: its name, its arguments, and what it returns."""
        number = self.turn
        path = f"src/module_{self._random.randrange(40)}.py"
        name, arguments = (
            ("Read", {"path": path}) if number % 2 else ("Grep", {"pattern": "verbose", "path": path})
        )
        lines = [f"{line}: option_{self._random.randrange(99)} = verbose" for line in range(4 + number % 3)]
        return name, arguments, "\n".join(lines)

    def _system(self) -> list[str]:
        """The blocks of the system prompt."""
        late = self.turn >= MIDDLE
        blocks = [self._rules]
        environment = ["Working directory: /home/dev/project", "Platform: linux"]
        if "date" in self.planted:
            environment.append(f"Today's date: 2026-11-{26 if late else 25}")
        blocks.append("<env>\n" + "\n".join(environment) + "\n</env>")
        if "git" in self.planted:
            changed = "M src/cli.py\nM src/log.py" if late else "M src/cli.py"
            blocks.append(
                "gitStatus: This is the git status of the repository.\nCurrent branch: main\n\n"
                f"Status:\n{changed}\n\nRecent commits:\n1a2b3c4 Start"
            )
        if "budget" in self.planted:
            left = [180_000 - 700 * n for n in range(self.turn + 1)]
            blocks += [f"<total_tokens>{each} left</total_tokens>" for each in left]
        if "nonce" in self.planted:
            nonce = "".join(self._nonces.choices("0123456789abcdef", k=10))
            blocks.insert(0, f"x-anthropic-billing-header: cc_version=2.1.328; cch={nonce};")
        return blocks

    def _offered(self) -> list[dict[str, Any]]:
        tools = _tools()
        moved = "tools" in self.planted and self.turn >= MIDDLE
        return [*tools[4:], *tools[:4]] if moved else tools


class ClaudeCode(AgentSession):
    """Messages: system blocks, tools with input schemas, tool_use and tool_result blocks, cache marks."""

    path, name = "/v1/messages", "Claude Code"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": self._task}]}
        ]

    def body(self) -> dict[str, Any]:
        system: list[dict[str, Any]] = [{"type": "text", "text": text} for text in self._system()]
        system[-1]["cache_control"] = {"type": "ephemeral"}
        tools = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
            for f in (tool["function"] for tool in self._offered())
        ]
        return {
            "model": "builtin",
            "max_tokens": 16,
            "temperature": 0,
            "system": system,
            "tools": tools,
            "tool_choice": {"type": "none"},
            "messages": self._messages,
        }

    def answered(self, response: dict[str, Any]) -> None:
        said = "".join(block.get("text", "") for block in response["content"])
        name, arguments, result = self._call()
        id = f"toolu_{self.turn:04d}"
        call = {"type": "tool_use", "id": id, "name": name, "input": arguments}
        text = [{"type": "text", "text": said}] if said else []
        returned = {"type": "tool_result", "tool_use_id": id, "content": result}
        self._messages = [
            *self._messages,
            {"role": "assistant", "content": [*text, call]},
            {"role": "user", "content": [returned]},
        ]
        self.turn += 1


class Codex(AgentSession):
    """Responses without a store: instructions, and all items of the session as input."""

    path, name = "/v1/responses", "Codex"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        context = "<environment_context>\n  <cwd>/home/dev/project</cwd>\n  <shell>bash</shell>\n</environment_context>"
        self._items: list[dict[str, Any]] = [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": context}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": self._task}]},
        ]

    def body(self) -> dict[str, Any]:
        return {
            "model": "builtin",
            "max_output_tokens": 16,
            "temperature": 0,
            "instructions": "\n\n".join(self._system()),
            "tools": [{"type": "function", **tool["function"]} for tool in self._offered()],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": f"session-{self._task[:8]}",
            "input": self._items,
        }

    def answered(self, response: dict[str, Any]) -> None:
        name, arguments, result = self._call()
        id = f"call_{self.turn:04d}"
        said = [item for item in response["output"] if item["type"] == "message"]
        call = {"type": "function_call", "call_id": id, "name": name, "arguments": json.dumps(arguments)}
        returned = {"type": "function_call_output", "call_id": id, "output": result}
        self._items = [*self._items, *[_sent(item) for item in said], call, returned]
        self.turn += 1


def _sent(item: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": part["text"]} for part in item["content"]]
    return {"type": "message", "role": "assistant", "content": parts}


class OpenCode(AgentSession):
    """Chat completions: one system message, tool calls and tool messages."""

    path, name = "/v1/chat/completions", "opencode"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": self._task}]

    def body(self) -> dict[str, Any]:
        return {
            "model": "builtin",
            "max_tokens": 16,
            "temperature": 0,
            "messages": [{"role": "system", "content": "\n\n".join(self._system())}, *self._messages],
            "tools": self._offered(),
            "tool_choice": "none",
        }

    def answered(self, response: dict[str, Any]) -> None:
        name, arguments, result = self._call()
        id = f"call_{self.turn:04d}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": response["choices"][0]["message"]["content"],
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        }
        if "reasoning" in self.planted:
            answer["reasoning_content"] = (
                f"Step {self.turn}: the option may be read in {arguments['path']}; look there."
            )
        self._messages = [
            *self._messages,
            answer,
            {"role": "tool", "tool_call_id": id, "content": result},
        ]
        self.turn += 1
        if "reasoning" in self.planted and self.turn == MIDDLE:
            self._messages.append({"role": "user", "content": "Now do the same for --quiet."})


AGENTS: tuple[type[AgentSession], ...] = (ClaudeCode, Codex, OpenCode)
