"""The headline figures of a simulated H200, the same on every machine, beside what the field claims.

    python -m benchmarks.headline --quick     # small sizes: to try the script

It writes its numbers into a copy of the record of the results page, ``docs/data/headline.json``, whose words and
measured figures stay. With ``--record docs/data/headline.json`` it writes the record itself, which
`scripts/results.py` renders.
"""

from __future__ import annotations

import datetime
import time
from pathlib import Path

from benchmarks.headline import simulated
from benchmarks.headline.record import RECORD, claims, read, recorded, write
from benchmarks.stage import plain_parser, say


def main() -> None:
    """Simulate, print, write."""
    parser = plain_parser(__doc__)
    names = [call.__name__ for call in simulated.PARTS]
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="names of figures")
    parser.add_argument(
        "--record", type=Path, default=Path("bench-results/headline.json"), help="file to write"
    )
    args = parser.parse_args()
    parts = read(RECORD)
    for call in simulated.PARTS:
        if call.__name__ not in args.only:
            continue
        began = time.monotonic()
        found = call(simulated.QUICK if args.quick else simulated.FULL)
        seconds = round(time.monotonic() - began)
        name, today = f"simulated, {call.__name__}", datetime.datetime.now(datetime.UTC).date().isoformat()
        parts[name] = recorded(parts[name], found) | {"date": today, "seconds": seconds}
        write(args.record, parts)
        say(f"{call.__name__}: {seconds} s")
    for cells in claims(parts)["rows"]:
        say("  ".join(str(cell) for cell in cells[:7]))
    say(f"written: {args.record}")


if __name__ == "__main__":
    main()
