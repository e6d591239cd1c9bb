"""The recipes: their commands are valid, their loads run, and their tables are what was recorded."""

from __future__ import annotations

import json

import pytest

from benchmarks.recipes import LOAD, PAGE, RECORD, figures, read_recipes, simulated, with_tables
from headrace.config import options

TEXT = PAGE.read_text(encoding="utf-8")
RECIPES = read_recipes(TEXT)
SAME = {"--weights": "--quantization", "--kv": "--kv-cache-dtype"}
"""Flags of a simulation whose name differs from that of the server."""


def given(words: list[str]) -> dict[str, str]:
    flags = [(flag, value) for flag, value in zip(words[::2], words[1::2], strict=True) if flag not in LOAD]
    return {SAME.get(flag, flag).removeprefix("--").replace("-", "_"): value for flag, value in flags}


def test_there_are_six_recipes():
    assert len(RECIPES) == 6


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_a_server_takes_the_settings_and_the_simulation_has_the_same(recipe):
    served, shown = given(recipe.serve[3:]), given(recipe.simulate[3:])
    typed = {name: [value] if name == "normalize_prompts" else value for name, value in served.items()}
    chosen = options({"model": recipe.serve[2]} | typed)
    assert set(served) <= chosen.chosen
    assert {name: value for name, value in served.items() if name != "normalize_prompts"} == shown


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=[pytest.mark.slow] if number > 1 else [], id=recipe.title)
        for number, recipe in enumerate(RECIPES)
    ],
)
def test_both_simulations_of_a_recipe_run(recipe):
    for words in (recipe.as_started(), recipe.simulate):
        numbers = figures(recipe, simulated(words, 25))
        assert all(number is None or number >= 0 for number in numbers)
        assert numbers[4] > 0


def test_the_tables_of_the_page_are_the_record():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(record) == {recipe.title for recipe in RECIPES}
    assert with_tables(TEXT, record) == TEXT


def test_each_recipe_is_better_than_the_server_as_started():
    for title, runs in json.loads(RECORD.read_text(encoding="utf-8")).items():
        (before, _, _, _, rate, _), (after, _, _, _, faster, _) = runs["as started"], runs["this recipe"]
        assert faster > rate or after > before, title
