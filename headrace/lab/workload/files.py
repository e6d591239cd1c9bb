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
    ``question`` or ``text``; ``max_tokens``, where present, overrides ``output_len``.

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
        prompt, max_tokens = _read(lines[number], f"{path}:{number + 1}", output_len)
        work.append(Work(f"w{i}", prompt, max_tokens, ignore_eos=ignore_eos))
    return tuple(work)


def _read(line: str, where: str, output_len: int) -> tuple[Prompt, int]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadLine(f"{where}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise BadLine(f"{where}: expected an object")
    max_tokens = int(row.get("max_tokens", output_len))
    if row.get("messages"):
        return tuple(Message(m["role"], m["content"]) for m in row["messages"]), max_tokens
    if row.get("turns"):
        return (Message("user", row["turns"][0]),), max_tokens
    if row.get("question"):
        return (Message("user", row["question"]),), max_tokens
    text = row.get("prompt") or row.get("text")
    if isinstance(text, list):
        return tuple(int(token) for token in text), max_tokens
    if isinstance(text, str):
        return text, max_tokens
    raise BadLine(f"{where}: none of messages, prompt, turns, question, text")
