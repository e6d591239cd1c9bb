"""Hooks for mkdocs: pages from files of the repository, and links from pages to source files.

A page with the line ``<!-- include: ../FILE.md -->`` shows that file. A link that leaves `docs/` leads to a page
of the site that shows the source file, or the files of a folder with the first line of what each says of itself.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = re.compile(r"^<!-- include: \.\./(\S+\.md) -->$", re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")

PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that have a page of their own."""

LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
    ".cpp": "cpp",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every source file or folder that some page links to."""
    wanted: set[str] = set()
    for file in files.documentation_pages():
        text, base = _text(file.src_uri, Path(str(file.abs_src_path)).read_text(encoding="utf-8"))
        for found in LINK.finditer(text):
            target = _target(found[1], base)
            if not target.startswith("docs/") and target not in PAGES and (ROOT / target).exists():
                wanted.add(target)
    wanted |= {_name(file) for each in wanted for file in _listed(ROOT / each)}
    for each in sorted(wanted):
        files.append(File.generated(config, _page_of(each), content=_source_page(each)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Include repository files, and lead links that leave `docs/` to pages of the site."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    text, base = _text(page.file.src_uri, markdown)
    here = posixpath.dirname(page.file.src_uri)

    def led(found: re.Match[str]) -> str:
        target = _target(found[1], base)
        inside = target.removeprefix("docs/") if target.startswith("docs/") else _page_of(target)
        return f"]({posixpath.relpath(inside, here or '.')}{found[2] or ''})"

    return LINK.sub(led, text)


def _text(src_uri: str, markdown: str) -> tuple[str, str]:
    """A page's text, and the folder of the repository that its links are relative to."""
    include = INCLUDE.search(markdown)
    if include:
        return (ROOT / include[1]).read_text(encoding="utf-8"), ""
    return markdown, posixpath.join("docs", posixpath.dirname(src_uri))


def _target(link: str, base: str) -> str:
    return posixpath.normpath(posixpath.join(base, link))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _page_of(target: str) -> str:
    return PAGES.get(target, f"source/{target}.md")


def _listed(path: Path) -> list[Path]:
    return sorted(path.glob("*.py")) if path.is_dir() else []


def _source_page(target: str) -> str:
    path = ROOT / target
    lines = [f"# {target}", ""]
    if path.is_dir():
        lines += ["| file | content |", "|---|---|"]
        lines += [
            f"| [`{each.name}`]({path.name}/{each.name}.md) | {_first_line(each)} |" for each in _listed(path)
        ]
    else:
        fence = "~~~~~~"
        lines += [
            f"{fence}{LANGUAGES.get(path.suffix, 'text')}",
            path.read_text(encoding="utf-8").rstrip(),
            fence,
        ]
    return "\n".join([*lines, ""])


def _first_line(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return said.partition("\n")[0].replace("|", "\\|")
