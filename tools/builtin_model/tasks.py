"""The mix of all chat tasks."""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.builtin_model.requests import Task
from tools.builtin_model.tasks_data import code, make_json
from tools.builtin_model.tasks_facts import arithmetic, count, facts, make_list, memory
from tools.builtin_model.tasks_stories import qa, story, summarise
from tools.builtin_model.tasks_talk import fallback, small_talk
from tools.builtin_model.tasks_text import copy, edit

TASKS: list[tuple[Callable[[random.Random], Task], float]] = [
    (story, 18),
    (qa, 16),
    (facts, 8),
    (memory, 5),
    (make_list, 8),
    (count, 5),
    (make_json, 8),
    (code, 6),
    (copy, 14),
    (edit, 12),
    (arithmetic, 4),
    (small_talk, 5),
    (fallback, 3.5),
    (summarise, 3.5),
]


def draw(r: random.Random) -> Task:
    """Draw one task from the mix."""
    functions, weights = zip(*TASKS, strict=True)
    task: Task = r.choices(functions, weights)[0](r)
    return task
