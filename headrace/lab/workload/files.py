"""Workloads from files of prompts, one JSON object per line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from headrace.lab.workload.work import Message, Prompt, Work


class BadLine(ValueError):
    """A line without a prompt; the message names the file and the line."""


def jsonl(
    path: Path, count: int, output_len: int, seed: int = 0, ignore_eos: bool = False
) -> tuple[Work, ...]:
    """``count`` prompts from a file in random order, starting over when all have been used.

    A line gives its prompt as ``messages``, ``prompt`` (text or token ids), ``turns`` (the first is used),
    ``question`` or ``text``; ``max_tokens``, if it is not null, overrides ``output_len``. ``tenant`` and
    ``service_tier`` name the tenant and the class.

    Raises:
        BadLine: a line without a prompt or with a wrong type, or an empty file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadLine(f"{path}: the file is not UTF-8 text ({error})") from None
    # Not `splitlines`, which also splits at separators that JSON allows within strings.
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise BadLine(f"{path}: no prompts")
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)
    work = []
    for i in range(count):
        number = order[i % len(order)]
        where = f"{path}:{number + 1}"
        work.append(_work(f"w{i}", _row(lines[number], where), where, output_len, ignore_eos))
    return tuple(work)


def _work(name: str, row: dict[str, Any], where: str, output_len: int, ignore_eos: bool) -> Work:
    try:
        max_tokens = output_len if row.get("max_tokens") is None else int(row["max_tokens"])
        if max_tokens < 1:
            raise BadLine(f"{where}: max_tokens must be at least 1, got {max_tokens}")
        return Work(
            name,
            _prompt(row, where),
            max_tokens,
            ignore_eos=ignore_eos,
            tenant=str(row.get("tenant") or "default"),
            service_class=str(row.get("service_tier") or "default"),
        )
    except BadLine:
        raise
    except KeyError as error:
        raise BadLine(f"{where}: a message without {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise BadLine(f"{where}: cannot be read: {error}") from None


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadLine(f"{where}: not JSON ({error.msg})") from None
    except RecursionError:
        raise BadLine(f"{where}: nested too deeply") from None
    if not isinstance(row, dict):
        raise BadLine(f"{where}: expected an object")
    return row


def _prompt(row: dict[str, Any], where: str) -> Prompt:
    if row.get("messages"):
        return tuple(Message(m["role"], m["content"]) for m in row["messages"])
    if row.get("turns"):
        return (Message("user", _text(row["turns"][0])),)
    if row.get("question"):
        return (Message("user", _text(row["question"])),)
    text = row.get("prompt") or row.get("text")
    if isinstance(text, list):
        return tuple(int(token) for token in text)
    if isinstance(text, str):
        return text
    raise BadLine(f"{where}: none of messages, prompt, turns, question, text")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value
