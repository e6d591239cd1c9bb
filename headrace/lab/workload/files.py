"""Workloads from files of prompts, one JSON object per line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from headrace.lab.workload.work import Message, Prompt, Work


class BadLine(ValueError):
    """A line that holds no prompt; the message names the file and the line."""


def jsonl(
    path: Path, count: int, output_len: int, seed: int = 0, ignore_eos: bool = False
) -> tuple[Work, ...]:
    """``count`` prompts drawn from a file, again from the start once all have been drawn.

    A line gives its prompt as ``messages``, ``prompt`` (text or token ids), ``turns`` (the first is asked),
    ``question`` or ``text``; ``max_tokens``, where present, overrides ``output_len``. ``tenant`` and
    ``service_tier`` say whose it is and how urgent.

    Raises:
        BadLine: a line without any of them, or an empty file.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise BadLine(f"{path}: no prompts")
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)
    work = []
    for i in range(count):
        number = order[i % len(order)]
        where = f"{path}:{number + 1}"
        row = _row(lines[number], where)
        work.append(
            Work(
                f"w{i}",
                _prompt(row, where),
                int(row.get("max_tokens", output_len)),
                ignore_eos=ignore_eos,
                tenant=str(row.get("tenant", "default")),
                service_class=str(row.get("service_tier", "default")),
            )
        )
    return tuple(work)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadLine(f"{where}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise BadLine(f"{where}: expected an object")
    return row


def _prompt(row: dict[str, Any], where: str) -> Prompt:
    if row.get("messages"):
        return tuple(Message(m["role"], m["content"]) for m in row["messages"])
    if row.get("turns"):
        return (Message("user", row["turns"][0]),)
    if row.get("question"):
        return (Message("user", row["question"]),)
    text = row.get("prompt") or row.get("text")
    if isinstance(text, list):
        return tuple(int(token) for token in text)
    if isinstance(text, str):
        return text
    raise BadLine(f"{where}: none of messages, prompt, turns, question, text")
