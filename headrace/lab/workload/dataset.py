"""Workloads by name, for the command line, scripts and reports: token ids, chats, files and traces."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.lab.workload.population import HIGH_VARIANCE, arriving, log_normal, mixture, poisson
from headrace.lab.workload.traces import BadTrace, read_trace
from headrace.lab.workload.work import Message, Prompt, Synthesis, Work, replayed

VOCABULARY = range(10, 500)
"""Token ids to draw from: above the usual special tokens, and within the vocabulary of tiny tokenizers."""


def _drawn(
    prompts: Sequence[int], answers: Sequence[int], vocabulary: range, rng: random.Random
) -> list[Work]:
    return [
        Work(f"w{i}", tuple(rng.choices(vocabulary, k=prompt)), max_tokens=answer, ignore_eos=True)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def fixed_lengths(
    count: int, input_len: int, output_len: int, seed: int = 0, vocabulary: range = VOCABULARY
) -> tuple[Work, ...]:
    """Prompts of equal length, and outputs of equal length."""
    return tuple(_drawn([input_len] * count, [output_len] * count, vocabulary, random.Random(seed)))


def log_normal_lengths(
    count: int,
    input_len: int,
    output_len: int,
    sigma: float = 0.8,
    seed: int = 0,
) -> tuple[Work, ...]:
    """Log-normal lengths with these medians, at most eight times the median."""
    rng = random.Random(seed)
    prompts = log_normal(count, input_len, sigma, 1, 8 * input_len, rng)
    answers = log_normal(count, output_len, sigma, 1, 8 * output_len, rng)
    return tuple(_drawn(prompts, answers, VOCABULARY, rng))


def high_variance(count: int, input_len: int = 24, seed: int = 0) -> tuple[Work, ...]:
    """80 % of outputs under 30 tokens and 4 % over 800, the rest between; prompts of equal length."""
    rng = random.Random(seed)
    return tuple(_drawn([input_len] * count, mixture(count, HIGH_VARIANCE, rng), VOCABULARY, rng))


def shared_prefix(
    count: int,
    prefix_len: int = 1000,
    input_len: int = 32,
    output_len: int = 16,
    seed: int = 0,
) -> tuple[Work, ...]:
    """Prompts that begin with the same ``prefix_len`` tokens, as under one system prompt."""
    rng = random.Random(seed)
    prefix = tuple(rng.choices(VOCABULARY, k=prefix_len))
    return tuple(
        Work(f"w{i}", prefix + tuple(rng.choices(VOCABULARY, k=input_len)), output_len, ignore_eos=True)
        for i in range(count)
    )


def long_among_decoders(
    decoders: int = 16,
    output_len: int = 256,
    long_len: int = 4000,
    arrival: float = 1.0,
    seed: int = 0,
) -> tuple[Work, ...]:
    """Streams that decode, and one long prompt that arrives ``arrival`` seconds later.

    The long prompt is last, with ``intruder`` as ``expect``; the others have ``stream``.
    """
    rng = random.Random(seed)
    streams = [
        Work(f"stream{i}", tuple(rng.choices(VOCABULARY, k=16)), output_len, 0.0, True, expect="stream")
        for i in range(decoders)
    ]
    intruder = tuple(rng.choices(VOCABULARY, k=long_len))
    return (*streams, Work("intruder", intruder, 8, arrival, ignore_eos=True, expect="intruder"))


NAMES = ("Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Sara", "Leo", "Emma", "Jack")
GROUPS = ("animals", "fruits", "colours", "tools", "cities")
LONGEST_TOKENS = 2000
"""Maximum output length, which limits the effect of an output that does not end by itself."""


def _short(rng: random.Random) -> str:
    return rng.choice(
        (
            f"What is {rng.randint(1, 20)} plus {rng.randint(1, 20)}?",
            f"List 3 {rng.choice(GROUPS)}.",
            f"My name is {rng.choice(NAMES)}.",
            f"Hello, I am {rng.choice(NAMES)}.",
        )
    )


def _middle(rng: random.Random) -> str:
    return f"Tell me a short story about {rng.choice(NAMES)}."


def _long(rng: random.Random) -> str:
    return f"Write a story about {rng.choice(NAMES)} in 10 chapters."


def _chat(i: int, text: str, expect: str) -> Work:
    return Work(f"w{i}", (Message("user", text),), max_tokens=LONGEST_TOKENS, expect=expect)


def high_variance_chats(count: int, seed: int = 0) -> tuple[Work, ...]:
    """Chats with 80 % short, 16 % middle and 4 % long outputs, shuffled; greedy, ended by the model."""
    rng = random.Random(seed)
    long, middle = round(0.04 * count), round(0.16 * count)
    kinds = ["long"] * long + ["middle"] * middle + ["short"] * (count - long - middle)
    rng.shuffle(kinds)
    write = {"short": _short, "middle": _middle, "long": _long}
    return tuple(_chat(i, write[kind](rng), kind) for i, kind in enumerate(kinds))


class BadLine(ValueError):
    """A line without a prompt; the message names the file and the line."""


def jsonl(path: Path, count: int, output_len: int, seed: int = 0) -> tuple[Work, ...]:
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
        work.append(_work(f"w{i}", _row(lines[number], where), where, output_len))
    return tuple(work)


def _work(name: str, row: dict[str, Any], where: str, output_len: int) -> Work:
    try:
        max_tokens = output_len if row.get("max_tokens") is None else int(row["max_tokens"])
        if max_tokens < 1:
            raise BadLine(f"{where}: max_tokens must be at least 1, got {max_tokens}")
        return Work(
            name,
            _prompt(row, where),
            max_tokens,
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
        raise TypeError(f"expected text, got {value!r:.80}")
    return value


class BadDataset(ValueError):
    """An unknown dataset, or a dataset without its file."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The parameters of a workload; equal values give equal workloads.

    ``input_len`` and ``output_len`` are in tokens; depending on the dataset they are fixed lengths, medians, or
    limits. ``rate`` is in requests per second; infinite means that all requests are due at the start, or at the times
    of the trace.
    """

    name: str = "high-variance"
    path: str | None = None
    count: int = 300
    input_len: int = 24
    output_len: int = 128
    prefix_len: int = 1000
    seed: int = 0
    rate: float = math.inf
    burstiness: float = 1.0

    def draw(self, workload: Workload | None = None) -> tuple[Work, ...]:
        """The requests in order of arrival; ``workload`` overrides ``name``.

        Raises:
            BadDataset: an unknown name, no file name, or a file that is not a trace.
        """
        if workload is not None:
            work = tuple(sorted(workload.draw(self), key=lambda each: each.arrival))
        elif self.name in DATASETS:
            work = DATASETS[self.name](self)
        else:
            raise BadDataset(
                f"there is no dataset {self.name!r:.80}; known datasets are {', '.join(DATASETS)}"
            )
        if math.isinf(self.rate) and (workload is not None or self.name == "trace"):
            return work  # the workload has its own arrival times
        return arriving(work, poisson(len(work), self.rate, self.seed, self.burstiness))


class Workload(Protocol):
    """Draws the ``count`` requests of a dataset; equal datasets give equal requests."""

    def draw(self, dataset: Dataset) -> Sequence[Work]: ...


def _jsonl(d: Dataset) -> tuple[Work, ...]:
    if d.path is None:
        raise BadDataset("--dataset-name jsonl needs a file: --dataset-path FILE")
    return jsonl(Path(d.path), d.count, d.output_len, d.seed)


def _trace(d: Dataset) -> tuple[Work, ...]:
    if d.path is None:
        raise BadDataset("--dataset-name trace needs a file: --dataset-path FILE")
    try:
        return tuple(replayed(read_trace(Path(d.path), d.count), Synthesis(VOCABULARY, d.seed)))
    except BadTrace as error:
        raise BadDataset(str(error)) from None


DATASETS: Mapping[str, Callable[[Dataset], tuple[Work, ...]]] = {
    "high-variance": lambda d: high_variance(d.count, d.input_len, d.seed),
    "high-variance-chats": lambda d: high_variance_chats(d.count, d.seed),
    "fixed": lambda d: fixed_lengths(d.count, d.input_len, d.output_len, d.seed),
    "log-normal": lambda d: log_normal_lengths(d.count, d.input_len, d.output_len, seed=d.seed),
    "shared-prefix": lambda d: shared_prefix(d.count, d.prefix_len, d.input_len, d.output_len, d.seed),
    "jsonl": _jsonl,
    "trace": _trace,
}
