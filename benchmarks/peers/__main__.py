"""``python -m benchmarks.peers {install,race,picture,speculation}``; ``--help`` lists their options."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import speculation
from benchmarks.peers.contenders import MEANING
from benchmarks.peers.install import PEERS, NotReady
from benchmarks.peers.places import HOME, Places
from benchmarks.peers.server import exit_on_signals
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.workloads import NAMES, workload
from headrace.plots import NoPlots


def command_line() -> argparse.ArgumentParser:
    """The command line parser."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--home", type=Path, default=HOME, help="where peers and models lie")
    usable = len(os.sched_getaffinity(0))
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="install peers into environments of their own")
    installing.add_argument("peer", nargs="+", choices=list(PEERS))
    racing = commands.add_parser(
        "race", help="race contenders", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    racing.add_argument("--model", choices=list(SHAPES), default="smollm2-135m")
    racing.add_argument("--precision", choices=list(MEANING), default="bf16")
    racing.add_argument("--workload", choices=NAMES, default="decode")
    racing.add_argument(
        "--concurrency", type=_number(), help="requests open at once [default: the workload's]"
    )
    racing.add_argument("--requests", type=_number(), help="requests of a round [default: the workload's]")
    racing.add_argument("--contenders", nargs="+", help="[default: all that have the precision]")
    racing.add_argument("--rounds", type=_number(), default=3)
    racing.add_argument("--cores", type=_number(usable), default=min(2, usable))
    racing.add_argument("--output", type=Path, help="JSON; a PNG lies beside it [default: bench-results/…]")
    drafting = commands.add_parser(
        "speculation", help=speculation.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    speculation.add_options(drafting)
    drawing = commands.add_parser("picture", help="draw several races' results as one picture")
    drawing.add_argument("race", nargs="+", type=Path, help="JSON that a race has written")
    drawing.add_argument("--output", type=Path, required=True, help="SVG, or PNG")
    return parser


def _number(most: float = math.inf) -> Callable[[str], int]:
    """A converter of an option's text into a number from 1 to ``most``."""

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is no number") from None
        if not 1 <= found <= most:
            allowed = "at least 1" if math.isinf(most) else f"from 1 to {most}"
            raise argparse.ArgumentTypeError(f"{text} is not {allowed}")
        return found

    return number


def main() -> None:
    """Read the command line and run the command."""
    parser = command_line()
    args = parser.parse_args()
    places = Places(args.home.expanduser())
    if args.command == "install":
        for peer in args.peer:
            PEERS[peer](places)
        return
    if args.command == "speculation":
        speculation.run(args, places)
        return
    if args.command == "picture":
        from benchmarks.peers.picture import draw, read

        try:
            draw([read(path) for path in args.race], args.output)
        except (OSError, ValueError, NoPlots) as error:
            parser.error(str(error))
        return
    from benchmarks.peers.race import Race, run

    contenders = args.contenders or list(MEANING[args.precision])
    if unknown := set(contenders) - set(MEANING[args.precision]):
        parser.error(f"{', '.join(sorted(unknown))} cannot be raced at {args.precision}")
    if len(set(contenders)) < max(2, len(contenders)):
        parser.error(f"--contenders: a race has two or more of different names, got {' '.join(contenders)}")
    try:
        load = workload(args.workload, args.concurrency, args.requests)
    except ValueError as error:
        parser.error(str(error))
    name = f"peers-{args.model}-{args.precision}-{load.name}-{load.concurrency}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    exit_on_signals()
    race = Race(args.model, args.precision, load, contenders, args.rounds, args.cores, places)
    try:
        failed = run(race, args.output or Path("bench-results") / name)
    except (NotReady, NoPlots) as error:
        parser.error(str(error))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
