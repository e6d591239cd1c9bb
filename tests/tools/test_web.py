"""The built pages are those of their sources, few and small, and load nothing from other hosts."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "tools" / "web"
BUILT = ROOT / "headrace" / "api" / "pages" / "static"
FILES = ("package-lock.json", "package.json", "sources.ts", "tsconfig.json", "vite.config.ts")
FOLDERS = ("src", "static")
MANIFEST = "manifest.json"
REBUILD = "run `npm ci && npm run build` in tools/web and commit the built files"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sources_digest() -> str:
    """As ``sourcesDigest`` in ``tools/web/sources.ts``."""
    found = [WEB / name for name in FILES]
    found += [path for folder in FOLDERS for path in (WEB / folder).rglob("*") if path.is_file()]
    paths = sorted(path.relative_to(WEB).as_posix() for path in found)
    return digest("".join(f"{path} {digest((WEB / path).read_bytes())}\n" for path in paths).encode())


def built(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_built_files_are_those_of_the_sources() -> None:
    assert json.loads((BUILT / MANIFEST).read_text())["sources"] == sources_digest(), REBUILD


def test_no_built_file_was_changed_by_hand() -> None:
    files = built(BUILT)
    manifest = json.loads(files.pop(MANIFEST))
    assert {name: digest(content) for name, content in files.items()} == manifest["files"], REBUILD


def test_a_build_gives_the_same_bytes(tmp_path: Path) -> None:
    npx = shutil.which("npx")
    if npx is None or not (WEB / "node_modules").is_dir():
        pytest.skip("node or tools/web/node_modules is not there: run `npm ci` in tools/web")
    subprocess.run([npx, "tsc", "--noEmit"], cwd=WEB, check=True, timeout=120)
    command = [npx, "vite", "build", "--outDir", str(tmp_path), "--emptyOutDir", "--logLevel", "error"]
    subprocess.run(command, cwd=WEB, check=True, timeout=120)
    assert built(tmp_path) == built(BUILT), REBUILD


def test_every_built_file_is_part_of_an_installed_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = ROOT / "headrace"
    patterns = project["tool"]["setuptools"]["package-data"]["headrace"]
    installed = {path for pattern in patterns for path in package.glob(pattern)}
    assert set(BUILT.iterdir()) <= installed


def test_the_pages_are_few_and_small() -> None:
    files = built(BUILT)
    assert len(files) <= 10
    assert sum(len(gzip.compress(content)) for content in files.values()) < 100_000


def test_the_pages_name_no_other_host() -> None:
    for name, content in built(BUILT).items():
        hosts = set(re.findall(rb"(?:https?:)?//([a-z0-9.-]+\.[a-z]{2,})", content))
        assert hosts <= {b"www.w3.org"}, name  # namespaces of SVG and MathML


def test_the_pages_may_run_under_their_security_policy() -> None:
    script = (BUILT / "app.js").read_text(encoding="utf-8")
    assert not re.search(r"\beval\(|new Function\(|createElement\(.style.\)", script)
