"""Evaluation on held-out requests: ``python -m training.evaluate``.

Requests come from the corpus's grammar under another seed than the training's. Answers that are determined by
their request must be right to the letter; free answers are judged by the rules of ``follows``. A second set was
written by hand (``natural.py``).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training import lexicon as lx
from training.natural import NATURAL
from training.requests import Task
from training.tasks_data import code, make_json
from training.tasks_facts import arithmetic, count, facts, make_list, memory
from training.tasks_scenes import scenes
from training.tasks_stories import qa, story, summarise
from training.tasks_talk import SMALL_TALK, fallback, small_talk
from training.tasks_text import copy, edit

HELD_OUT_SEED = 987_654
LIMIT = 1600  # tokens; an answer that is longer counts as one without an end
KINDS: list[tuple[str, Callable[[random.Random], Task]]] = [
    ("story, one to three sentences", lambda r: story(r, "tiny")),
    ("story, short", lambda r: story(r, "short")),
    ("story, medium", lambda r: story(r, "medium")),
    ("story, long", lambda r: story(r, "long")),
    ("story, very long", lambda r: story(r, "very_long")),
    ("story, n chapters", lambda r: story(r, "chapters")),
    ("questions about a story", qa),
    ("questions about a few sentences", scenes),
    ("questions about facts", facts),
    ("memory of the chat", memory),
    ("summary or continuation", summarise),
    ("list", make_list),
    ("count", count),
    ("JSON", make_json),
    ("code", code),
    ("copy", copy),
    ("edit", edit),
    ("sum", arithmetic),
    ("small talk", small_talk),
    ("fallback", fallback),
]


@dataclass
class Score:
    """Counts of one kind."""

    kind: str
    asked: int = 0
    right: int = 0
    ended: int = 0
    tokens: int = 0
    agreed: int = 0
    compared: int = 0


def _sentences(text: str) -> int:
    return len(re.findall(r"[.!?](?: |$)", text))


def follows(task: Task, answer: str) -> bool:
    """Say whether a free answer does what its request asks for."""
    if task.kind.startswith("story"):
        chapters = [int(n) for n in re.findall(r"^Chapter (\d+) of ", answer, re.MULTILINE)]
        if task.kind == "story_chapters" or task.kind == "story_very_long":
            wanted = re.findall(r"^Chapter (\d+) of ", task.turns[0][1], re.MULTILINE)
            exact = task.kind == "story_chapters"
            if chapters != list(range(1, len(chapters) + 1)) or not answer.endswith("The End."):
                return False
            if (exact and len(chapters) != len(wanted)) or len(chapters) < 2:
                return False
        if task.kind == "story_tiny" and _sentences(answer) != _sentences(task.turns[0][1]):
            return False
        return task.name in answer
    if task.kind == "list":
        category, _, n = task.name.partition(":")
        if ", " in answer and "\n" not in answer:
            items = answer.split(", ")
        else:
            items = [re.sub(r"^(\d+\.|-) ", "", line) for line in answer.split("\n")]
        return len(items) == len(set(items)) == int(n) and set(items) <= set(lx.CATEGORIES[category])
    if task.kind == "json_free":
        try:
            value = json.loads(answer)
        except ValueError:
            return False
        rows = value if isinstance(value, list) else [value]
        return all(isinstance(row, dict) and ",".join(row) == task.name for row in rows)
    if task.kind == "small_talk":
        return any(answer in answers for _, answers in SMALL_TALK)
    if task.kind == "fallback":
        return "toy model" in answer or "too small" in answer
    return bool(task.name) and task.name in answer


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def answer_greedily(model: Any, prompts: list[list[int]], limit: int = LIMIT) -> list[list[int]]:
    """Return the tokens of the greedy answers, each with its end token when it has one."""
    config = model.generation_config
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[config.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, temperature=None, top_p=None
    )
    answers = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in config.eos_token_id), len(row))
        answers.append(row[:end])
    return answers


def evaluate(folder: Path, per_kind: int = 12) -> dict[str, list[Score]]:
    """Return the scores of target and draft; the target's carry its greedy agreement with the draft."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "target")
    models = {name: _load(folder / name) for name in ("target", "draft")}
    stops = set(models["target"].generation_config.eos_token_id)
    scores: dict[str, list[Score]] = {name: [] for name in models}
    for kind, make in KINDS:
        r = random.Random(f"{HELD_OUT_SEED} {kind}")
        items: list[tuple[Task, str, list[int]]] = []
        while len(items) < per_kind:
            task, messages = make(r), []
            for request, expected in task.turns:
                messages.append({"role": "user", "content": request})
                prompt = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
                items.append((task, expected, prompt))
                messages.append({"role": "assistant", "content": expected})
        items = items[:per_kind]
        for name, model in models.items():
            score = Score(kind)
            scores[name].append(score)
            answers = answer_greedily(model, [prompt for _, _, prompt in items])
            for (task, expected, prompt), answer in zip(items, answers, strict=True):
                text = tokenizer.decode(answer, skip_special_tokens=True)
                score.asked += 1
                score.right += text == expected if task.exact else follows(task, text)
                score.ended += answer[-1] in stops
                score.tokens += len(answer)
                if name == "target":
                    with torch.no_grad():
                        logits = models["draft"](torch.tensor([prompt + answer])).logits
                    guesses = logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
                    score.agreed += sum(a == b for a, b in zip(guesses, answer, strict=True))
                    score.compared += len(answer)
    return scores


def answer_by_hand(folder: Path) -> list[tuple[str, str, bool]]:
    """Return the requests of ``natural.py`` with the target's greedy answers and whether each is right."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "target")
    model = _load(folder / "target")
    results = []
    for request, rule in NATURAL:
        messages = [{"role": "user", "content": request}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.decode(answer_greedily(model, [prompt])[0], skip_special_tokens=True)
        results.append((request, answer, rule(answer)))
    return results


def report(folder: Path, per_kind: int = 12) -> str:
    """Return the evaluation as a Markdown table, and the answers to requests written by hand that were wrong."""
    scores = evaluate(folder, per_kind)
    lines = [
        "| kind | answers | target right | ended | mean tokens | draft agrees | draft alone right |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for target, draft in zip(scores["target"], scores["draft"], strict=True):
        lines.append(
            f"| {target.kind} | {target.asked} | {target.right / target.asked:.0%} "
            f"| {target.ended / target.asked:.0%} | {target.tokens / target.asked:.0f} "
            f"| {target.agreed / target.compared:.0%} | {draft.right / draft.asked:.0%} |"
        )
    answers = answer_by_hand(folder)
    lines += [
        "",
        f"Written by hand: {sum(right for *_, right in answers)} of {len(answers)} right. Wrong ones:",
        "",
    ]
    lines += [f"* {request!r}: {answer[:160]!r}" for request, answer, right in answers if not right]
    return "\n".join(lines)


def main() -> None:
    """Print the table for the shipped models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("headrace/builtin"))
    parser.add_argument("--per-kind", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(report(args.models, args.per_kind))


if __name__ == "__main__":
    main()
