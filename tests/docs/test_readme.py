"""What the pages tell a user to type works: commands parse, code runs, names and numbers are those of the code.

A fenced block of Python, and a Bash block of `curl` commands, is run; one that cannot be has a comment
``<!-- not run: why -->`` before it. Of `headrace` commands every flag and value is parsed as the command line would.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main
import yaml

from headrace.api.openapi import described
from headrace.cli import app
from headrace.cli.bench.targets import read_spec
from headrace.cli.experiment import read_experiment
from headrace.config import ENVIRONMENT_PREFIX, PARTS, options
from headrace.core.knobs import Knobs
from headrace.core.tenancy.tenants import CLASSES, EQUALS
from headrace.tuning.settings import live_settings, request_settings, values
from headrace.tuning.spec import read_spec as read_spec_of_experiment
from headrace.wiring.tenants import read_tenants
from tests.doubles.forks import run_forked
from tests.server.conftest import Server, serving

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *sorted(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "reference"),
]
COMMAND = typer.main.get_command(app)
OPTIONS = {each.name: each.default for part in PARTS.values() for each in fields(part)}
PANELS = {kind.__name__.removesuffix("Options") + " options" for kind in PARTS.values()}
"""Where a command's help has the options of `headrace.config`; it may have others of the same name."""

MOST_LINES = 120
"""Of the README: what does not fit belongs on a page."""

DEFAULT_URL = "http://127.0.0.1:8000"


class Block(NamedTuple):
    """A fenced block: where it is, its language and text, and why it is not run, if it is not."""

    page: str
    line: int
    language: str
    text: str
    not_run: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    fence = r"(?:<!-- not run: ([^>]*) -->\n)?^```(\w*)\n(.*?)^```$"
    for found in re.finditer(fence, text, flags=re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(page.name, line, found[2], found[3], found[1] or "")


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def name(value: object) -> str:
    return f"{value.page}:{value.line}" if isinstance(value, Block) else str(getattr(value, "name", value))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
CURL = [block for block in BLOCKS if block.language == "bash" and "curl" in block.text and not block.not_run]


def commands_in(text: str) -> Iterator[list[str]]:
    """The simple commands of some lines of shell that begin with ``headrace``."""
    for line in text.replace("\\\n", " ").splitlines():
        if "headrace" not in line or "curl" in line:
            continue
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if word in ("&&", "||", "|", ";"):
                if command[:1] == ["headrace"]:
                    yield command
                command = []
            else:
                command.append(word)


def inline_commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for text in re.findall(r"`(headrace [^`]+)`", prose_of(page)):
            if "{" not in text:  # a group of commands is named, not one that is typed
                for command in commands_in(text):
                    yield page.name, command


COMMANDS = [
    (name(block), command)
    for block in BLOCKS
    if block.language == "bash"
    for command in commands_in(block.text)
]
NAMED = list(inline_commands())


def shown(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)[:60]


def leaf_of(words: list[str]):
    """The command that words name, and its arguments."""
    command, rest = COMMAND, words[1:]
    while hasattr(command, "commands") and rest:
        assert rest[0] in command.commands, f"there is no command {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def flags_of(command: object) -> set[str]:
    own = {
        flag for each in command.params for flag in (*each.opts, *each.secondary_opts) if flag.startswith("-")
    }
    return own.union(*(flags_of(each) for each in getattr(command, "commands", {}).values()))


# -- the two commands ------------------------------------------------------------------------------------


def test_the_two_commands_are_there():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert "pip install -c constraints.txt . && headrace serve" in lines
    (pattern,) = re.findall(r"grep -m1 -E '([^']+)' README.md", (ROOT / ".ci/run").read_text())
    (line,) = [line for line in lines if re.search(pattern, line)]
    assert line.startswith("pip install -c constraints.txt ")
    assert ".[test]" in line
    assert (ROOT / "constraints.txt").is_file()


def test_the_readme_is_short_and_has_a_picture() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    (picture,) = re.findall(r"!\[[^\]]{20,}\]\(([^)]*)\)", text)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


# -- commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=shown)
def test_a_command_could_be_typed(where: str, words: list[str]) -> None:
    command, rest = leaf_of(words)
    given = command.make_context(words[-1], rest).params
    ours = {each.name for each in command.params if getattr(each, "rich_help_panel", None) in PANELS}
    chosen = {
        key: value
        for key, value in given.items()
        if key in ours & OPTIONS.keys() and value not in (None, [], ())
    }
    options(chosen)
    for target in given.get("target") or ():
        read_spec(target)


@pytest.mark.parametrize(("page", "words"), NAMED, ids=shown)
def test_a_command_that_is_named_exists(page: str, words: list[str]) -> None:
    command, rest = leaf_of(words)
    assert {word for word in rest if word.startswith("--")} <= flags_of(command)


OF_OTHERS = {
    *(
        "--discovery-backend",
        "--endpoint",
        "--event-plane",
        "--migration-limit",
        "--namespace",
        "--request-plane",
    ),
    *("--router-mode", "--kill", "--lives", "--at-once"),
}
"""Flags of Dynamo, of the benchmarks and of the examples."""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_that_are_named_exist(page: Path) -> None:
    known = flags_of(COMMAND)
    for line in prose_of(page).splitlines():
        ours = line.rstrip(" |").rpartition("|")[2]  # in a table of another's flags and ours, ours come last
        for flag in re.findall(r"`(--[a-z][a-z-]*)", ours):
            assert flag in known | OF_OTHERS | {"--help"}, f"{page.name} names {flag}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=name)
def test_a_file_that_is_shown_can_be_read(block: Block, tmp_path: Path) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)
    file = tmp_path / "file.yaml"
    file.write_text(block.text)
    if block.text.startswith("# tenants.yaml"):
        assert read_tenants(str(file)) != (EQUALS, CLASSES)
    elif block.text.startswith(("# experiment.yaml", "# drafts.yaml")):
        known = {**live_settings(64), **request_settings(("ngram",), 4, semantic=False)}
        present = values(live_settings(64), Knobs()) | {"draft_method": "all", "draft_tokens": 4}
        assert read_spec_of_experiment(read_experiment(file), known, present).guards
    else:
        options({}, file)


# -- code ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving("--embedding-model", "builtin") as server:
        yield server


def test_there_is_code_to_run():
    assert len(PYTHON) >= 4
    assert len(CURL) >= 4
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("block", PYTHON, ids=name)
def test_python_runs(block: Block, running: Server) -> None:
    compile(block.text, f"{block.page}:{block.line}", "exec")
    if block.not_run:
        return
    done = run_forked("-c", block.text.replace(DEFAULT_URL, running.url), folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("block", CURL, ids=name)
def test_curl_answers_as_shown(block: Block, running: Server) -> None:
    """Where a block of JSON follows, the answer has its keys; elsewhere it is no error."""
    done = subprocess.run(
        ["bash", "-e", "-c", block.text.replace(DEFAULT_URL, running.url)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    following = BLOCKS[BLOCKS.index(block) + 1]
    if following.page == block.page and following.language == "json":
        answer = done.stdout[max(0, done.stdout.rfind('}{"')) :].lstrip("}")
        assert sorted(json.loads(answer)) == sorted(json.loads(following.text, strict=False))
    else:
        assert done.stdout
        assert '"error"' not in done.stdout


# -- names and numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_of_metrics_routes_variables_and_files_are_those_of_the_code(page: Path) -> None:
    text = page.read_text()
    metrics = (ROOT / "docs/reference/metrics.md").read_text()
    assert [each for each in re.findall(r"headrace:[a-z_]+", text) if f"`{each}`" not in metrics] == []
    routes = {row.shown_path for row in described()}
    assert set(re.findall(r"`(?:GET |POST )?(/v1/[^` …]*)`", text)) <= routes
    for variable in re.findall(rf"{ENVIRONMENT_PREFIX}([A-Z_]+)", text):
        assert variable.lower() in OPTIONS
    for path in re.findall(r"`((?:headrace|tests|tools|docs|scripts)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for script in re.findall(r"`(?:python -m )?benchmarks\.(\w+)", text):
        there = ROOT / "benchmarks" / script
        assert there.with_suffix(".py").is_file() or (there / "__main__.py").is_file(), script


def test_documented_limits_have_the_real_defaults():
    table = re.findall(
        r"^\| `--([a-z-]+)` \| ([^|]+) \|", (ROOT / "docs/guide/serving.md").read_text(), re.MULTILINE
    )
    assert len(table) == 6
    shown = {"8 MiB": 8 << 20, "600 s": 600, "the model's": None}
    for flag, reported in table:
        default = shown[reported] if reported in shown else int(reported.replace(",", ""))
        assert OPTIONS[flag.replace("-", "_")] == default, flag


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
