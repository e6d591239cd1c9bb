"""Update the line counts of the reading list in ARCHITECTURE.md: ``python scripts/reading_list.py``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def recounted(page: str) -> str:
    """The page with the lines that its listed files have now, and their sum."""
    total = 0

    def row(match: re.Match[str]) -> str:
        nonlocal total
        lines = len((ROOT / match[1]).read_text().splitlines())
        total += lines
        return f"| `{match[1]}` | {lines} |"

    page = re.sub(r"^\| `(headrace/\S+\.py)` \| [\d,]+ \|$", row, page, flags=re.MULTILINE)
    return re.sub(r"^\| together \| [\d,]+ \|$", f"| together | {total:,} |", page, flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE = ROOT / "ARCHITECTURE.md"
    PAGE.write_text(recounted(PAGE.read_text()))
