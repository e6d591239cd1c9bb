"""The mix of all chat tasks."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.requests import Task
from training.tasks_data import code, make_json
from training.tasks_facts import arithmetic, count, facts, make_list, memory
from training.tasks_scenes import scenes
from training.tasks_stories import qa, story, summarise
from training.tasks_talk import fallback, small_talk
from training.tasks_text import copy, edit

TASKS: list[tuple[Callable[[random.Random], Task], float]] = [
    (story, 12),
    (qa, 10),
    (scenes, 15),
    (facts, 5),
    (memory, 4),
    (make_list, 9),
    (count, 4),
    (make_json, 12),
    (code, 6),
    (copy, 14),
    (edit, 11),
    (arithmetic, 3),
    (small_talk, 5),
    (fallback, 3),
    (summarise, 2),
]


def draw(r: random.Random) -> Task:
    """Draw one task from the mix."""
    functions, weights = zip(*TASKS, strict=True)
    task: Task = r.choices(functions, weights)[0](r)
    return task
