"""The documentation site builds strictly, has every page in its navigation, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("material")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


def pages(site: Path) -> Iterator[tuple[str, str]]:
    for file in site.rglob("*.html"):
        yield file.relative_to(site).as_posix(), file.read_text(encoding="utf-8")


def test_it_has_every_page(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        there = site / name.parent / "index.html" if name.name == "index" else site / name / "index.html"
        assert there.is_file(), name


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    for name, html in pages(site):
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?(https?:)?//", html)
        styled = re.findall(r"<link[^>]*(?:stylesheet|preconnect|icon)[^>]*https?://", html)
        assert not loaded + styled, name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"\']?https?://", sheet.read_text(encoding="utf-8")), (
            sheet.name
        )


def test_architecture_shows_the_repository_s_file(site: Path) -> None:
    title = (ROOT / "ARCHITECTURE.md").read_text().splitlines()[0].removeprefix("# ")
    shown = (site / "architecture" / "index.html").read_text()
    assert f"{title}<a" in shown
    assert "include:" not in shown


def test_links_to_source_files_lead_to_their_text(site: Path) -> None:
    page = (site / "concepts" / "continuous-batching" / "index.html").read_text()
    (target,) = re.findall(r"href=\"?([^\" >]*engine\.py/)", page)
    shown = (site / "concepts" / "continuous-batching" / target / "index.html").resolve().read_text()
    assert "class" in shown
    assert "Engine" in shown


def test_pictures_have_a_description_and_exist() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for text, target in re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", page.read_text()):
            assert len(text) > 15, page
            assert (page.parent / target).is_file(), target


@pytest.mark.parametrize(
    "name", ["continuous-batching", "paged-kv", "prefix-sharing", "chunked-prefill", "scheduler", "caches"]
)
def test_a_concept_has_a_drawing_and_says_where_its_code_is(name: str) -> None:
    text = (ROOT / "docs" / "concepts" / f"{name}.md").read_text()
    assert re.search(r"^!\[.*\]\(\.\./images/[\w-]+\.svg\)$", text, re.MULTILINE)
    assert "\n## Code\n" in text
