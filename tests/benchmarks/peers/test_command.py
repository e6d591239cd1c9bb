from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import command_line

ROOT = Path(__file__).parents[3]
SHOWN = re.findall(
    r"^python -m benchmarks\.peers (.+)$", (ROOT / "docs/guide/benchmarking.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("words", SHOWN)
def test_commands_in_the_guide_are_understood(words):
    assert command_line().parse_args(shlex.split(words, comments=True)).command


def test_the_guide_shows_all_commands():
    assert {words.split()[0] for words in SHOWN} == {"install", "race", "picture"}
