"""The reference pages are what the code says today; ``python scripts/reference.py`` writes them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

import headrace
from headrace.api.openapi import described
from headrace.config import PROFILES
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage

ROOT = Path(__file__).parents[2]


def script():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["options.md", "commands.md", "http.md", "metrics.md", "python.md", "models.md"]
)
def test_page_is_up_to_date(name: str) -> None:
    module = script()
    assert (module.FOLDER / name).read_text(encoding="utf-8") == module.PAGES[name]()


def test_every_route_and_metric_is_on_its_page() -> None:
    http = (ROOT / "docs/reference/http.md").read_text()
    assert all(row.shown_path in http for row in described() if row.summary)
    reported = (ROOT / "docs/reference/metrics.md").read_text()
    sheet = MetricsPage()
    Metrics(sheet)
    Goodput(sheet)
    served = re.findall(r"^# TYPE headrace:(\w+)", sheet.render().decode(), flags=re.MULTILINE)
    assert served
    assert all(name in reported for name in served)


def test_the_guide_names_the_routes_of_each_access() -> None:
    module = script()
    guide = module.GUIDE.read_text(encoding="utf-8")
    assert module.with_access_table(guide) == guide


def test_every_page_of_the_folder_is_generated() -> None:
    module = script()
    assert {page.name for page in module.FOLDER.glob("*.md")} == set(module.PAGES)


def test_the_python_page_has_every_public_name_and_field() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    for name in headrace.__all__:
        assert name.startswith("__") or f"\n## {name}\n" in page
    for each in fields(headrace.SamplingParams):
        assert f"| `{each.name}` |" in page


def test_memory_of_a_model_is_its_parameters_times_their_bytes() -> None:
    page = (ROOT / "docs/reference/models.md").read_text()
    (weights, contexts) = re.findall(r"^\| `llama-3.1-8b` \|(.*)\|$", page, re.MULTILINE)
    billions, plain, *_ = (float(cell) for cell in weights.split("|")[1:] if cell.strip())
    assert plain == pytest.approx(billions * 1e9 * 2 / 2**30, rel=0.001)
    per_token, _, per_request, *_ = (float(cell) for cell in contexts.split("|"))
    assert per_token == 2 * 32 * 8 * 128 * 2 / 1024  # keys and values, layers, heads, head size, bytes
    assert per_request == per_token * 8192 / 2**20


def test_links_between_pages_lead_somewhere() -> None:
    assert not [
        (page.name, target)
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]


def test_the_guide_shows_what_profiles_set() -> None:
    guide = (ROOT / "docs" / "guide" / "scheduling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([a-z-]+)` \|(.+)\|$", guide, re.MULTILINE)
    shown = {flag.replace("-", "_"): [cell.split()[0] for cell in cells.split("|")] for flag, cells in rows}
    reported = {name: [str(profile[name]) for profile in PROFILES.values()] for name in PROFILES["balanced"]}
    assert {name: cells for name, cells in shown.items() if name in reported} == reported
