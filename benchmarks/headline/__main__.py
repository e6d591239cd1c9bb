"""The headline table: every claim of the field beside ours, from real runs.

    python -m benchmarks.headline --quick                  # small sizes: to try the script
    python -m benchmarks.headline simulated                # a simulated H200, the same on every machine
    python -m benchmarks.headline measured --data FOLDER   # this machine's CPU

With ``--record docs/data/headline.json`` it writes the record of the results page, which `scripts/results.py` renders.
A run of some figures keeps the others of the record.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.headline import measured, published, simulated
from benchmarks.headline.measured import Found, Setting
from benchmarks.headline.record import claims, read, write
from benchmarks.stage import plain_parser, say
from headrace.lab.bench.report import machine_facts

PARTS: dict[str, Sequence[Callable[[Any], Found]]] = {
    "simulated": simulated.PARTS,
    "measured": measured.PARTS,
    "published": published.PARTS,
}


def run(part: str, args: argparse.Namespace, parts: dict[str, Any]) -> None:
    """Measure one part, and put each of its figures with its tables into ``parts``."""
    reports = Path("bench-results") / "headline"
    reports.mkdir(parents=True, exist_ok=True)
    size = simulated.QUICK if args.quick else simulated.FULL
    given = size if part == "simulated" else Setting(args.data, reports, args.quick)
    facts = machine_facts()
    for call in PARTS[part]:
        if args.only and call.__name__ not in args.only:
            continue
        began = time.monotonic()
        figures, tables = call(given)
        seconds = round(time.monotonic() - began)
        parts[f"{part}, {call.__name__}"] = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": facts["processor"] if part == "measured" else "any",
            "command": f"python -m benchmarks.headline {part} --only {call.__name__}"
            + " --quick" * args.quick,
            "seconds": seconds,
            "figures": [each._asdict() for each in figures],
            "tables": tables,
        }
        write(args.record, parts)
        say(f"{part}, {call.__name__}: {seconds} s")


def main() -> None:
    """Measure, print, write."""
    parser = plain_parser(__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="simulated, measured or published (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--only", nargs="+", default=[], help="names of figures, for example batching")
    parser.add_argument(
        "--data", type=Path, help="folder with prompts/ and semantic/; without it rows are left out"
    )
    parser.add_argument(
        "--record", type=Path, default=Path("bench-results/headline.json"), help="file to write"
    )
    args = parser.parse_args()
    names = [call.__name__ for calls in PARTS.values() for call in calls]
    if unknown := [*set(args.parts) - set(PARTS), *set(args.only) - set(names)]:
        parser.error(f"{unknown[0]} is neither of {', '.join(PARTS)} nor of {', '.join(names)}")
    parts = read(args.record)
    for part in args.parts or PARTS:
        run(part, args, parts)
    for cells in claims(parts)["rows"]:
        say("  ".join(str(cell) for cell in cells[:7]))
    say(f"written: {args.record}")


if __name__ == "__main__":
    main()
