"""Take the screenshots in `docs/images/screenshots/`: ``python scripts/screenshots.py``.

It starts a server with the built-in model, pictures its API page with headless Chromium (``chromium`` on the path), and
draws what commands print as SVG. Run it when a page, a start-up line or a table changes.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "screenshots"
HEADRACE = [sys.executable, "-m", "headrace"]
PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
BENCH = ["bench", "serve", "--base-url", URL, "--request-rate", "8", "--num-prompts", "40"]
CHROMIUM = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1200,900",
    "--virtual-time-budget=4000",
]
COLUMNS = 110


def draw(name: str, command: list[str], output: str) -> None:
    """Draw a command and its output as a terminal, without a font from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ headrace {' '.join(command)}", style="bold"))
    console.print(Text(output.rstrip()))
    svg = console.export_svg(title="Terminal", unique_id=name)
    (FOLDER / f"{name}.svg").write_text(re.sub(r"@font-face\s*{[^}]*}", "", svg), encoding="utf-8")


def picture(name: str, url: str) -> None:
    """Picture a page of the server in a fresh browser."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as profile:
        shot = f"--screenshot={FOLDER / name}.png"
        command = [browser, *CHROMIUM, f"--user-data-dir={profile}", shot, url]
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)


def main() -> None:
    """Take every picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as results:
        server = subprocess.Popen(
            [*HEADRACE, "serve", "--port", str(PORT)], stdout=subprocess.PIPE, text=True, cwd=results
        )
        try:
            assert server.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("ready"):
                line = server.stdout.readline()
                if not line:
                    sys.exit("the server did not start")
                lines.append(line)
            draw("serve", ["serve"], "".join(lines))
            picture("api-docs", f"{URL}/docs")
            done = subprocess.run(
                [*HEADRACE, *BENCH], capture_output=True, text=True, check=True, cwd=results
            )
            draw("bench", BENCH, done.stdout.partition("written:")[0])
        finally:
            server.terminate()
            server.wait(timeout=60)


if __name__ == "__main__":
    main()
