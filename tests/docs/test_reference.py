"""The reference pages are what the code says today; ``python scripts/reference.py`` writes them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from headrace.config import PROFILES
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.serve.http.openapi import OPERATIONS

ROOT = Path(__file__).parents[2]


def script():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["options.md", "http.md", "metrics.md"])
def test_page_is_up_to_date(name: str) -> None:
    module = script()
    assert (module.FOLDER / name).read_text(encoding="utf-8") == module.PAGES[name]()


def test_every_route_and_metric_is_on_its_page() -> None:
    http = (ROOT / "docs/reference/http.md").read_text()
    assert all(each.path in http for each in OPERATIONS)
    told = (ROOT / "docs/reference/metrics.md").read_text()
    sheet = MetricsPage()
    Metrics(sheet)
    Goodput(sheet)
    served = re.findall(r"^# TYPE headrace:(\w+)", sheet.render().decode(), flags=re.MULTILINE)
    assert served
    assert all(name in told for name in served)


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_guide_shows_what_profiles_set() -> None:
    guide = (ROOT / "docs" / "guide" / "scheduling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `--([a-z-]+)` \|(.+)\|$", guide, re.MULTILINE)
    shown = {flag.replace("-", "_"): [cell.split()[0] for cell in cells.split("|")] for flag, cells in rows}
    told = {name: [str(profile[name]) for profile in PROFILES.values()] for name in PROFILES["balanced"]}
    assert {name: cells for name, cells in shown.items() if name in told} == told
