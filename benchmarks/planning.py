"""Plans without devices, each from one ``headrace`` command: prefill and decode on different replicas (P/D) compared
with replicas for both, and fleets for 1,000 to 3,400,000 requests per second, the last one of nearly 10,000 devices.

The commands are printed, and a row of a Markdown table as soon as it is known. ``--block-size 64`` makes simulating P/D
three times as fast.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEVICES = 8
HANDOVER = "simulate llama-3.1-8b --device H100-SXM --block-size 64 --kv-offload-bytes 32GiB"
FLEETS = "plan llama-3.2-1b --device H100-SXM --max-devices 10000 --slo-ttft 0.5 --slo-tpot 0.03 --json"
CHATS = "rate=20,prompt=lognormal:600:0.6,answer=uniform:20:140,system=200"


def main() -> None:
    """Runs the commands and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(required=True)
    each = what.add_parser("handover", help="one workload on eight devices")
    each.add_argument("--rate", type=float, default=60.0, help="requests per second")
    each.add_argument("--prompt", type=int, default=2000, help="mean tokens of a prompt")
    each.add_argument("--output", type=int, default=200, help="mean tokens of an output")
    each.add_argument("--prefill", type=int, nargs="*", default=[0, 5, 6], help="prefill replicas of eight")
    each.add_argument("--bandwidth", type=float, default=25.0, help="GB per second and device")
    each.add_argument("--requests", type=int, default=1500)
    each.set_defaults(run=handover)
    each = what.add_parser("fleets", help="the cheapest fleet for each rate")
    each.add_argument("--rates", type=float, nargs="*", default=[1e3, 1e4, 1e5, 1e6, 3.4e6])
    each.add_argument("--requests", type=int, default=40_000)
    each.add_argument(
        "--more",
        default="--spot-share=0.5,--failures=0.001",
        help="further flags of headrace plan, with commas",
    )
    each.set_defaults(run=fleets)
    args = parser.parse_args()
    args.run(args)


def handover(args: argparse.Namespace) -> None:
    """One row for each number of prefill replicas."""
    words = [*HANDOVER.split(), "--replicas", str(DEVICES), "--requests", str(args.requests)]
    words += ["--transfer-bandwidth", f"{args.bandwidth:g}"]
    for count in args.prefill:
        words += ["--prefill-replicas", str(count)]
    prompt, output = (f"uniform:{mean // 2}:{mean * 3 // 2}" for mean in (args.prompt, args.output))
    words += ["--workload", f"rate={args.rate:g},prompt={prompt},answer={output}"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.json"
        _headrace([*words, "--output", str(path)])
        document = json.loads(path.read_text(encoding="utf-8"))
    runs = document.get("runs") or {f"{args.prefill[0]} prefill": document}
    for name, run in runs.items():
        summary = run["summary"]
        cells = [1e3 * summary[which][at] for which in ("ttft", "itl") for at in ("p50", "p99")]
        _row(
            f"{args.prompt:,}", f"{args.output}", f"{args.rate:g}", f"{args.bandwidth:g}", name,
            *(f"{cell:.1f}" for cell in cells), f"{summary['output_tokens_per_second']:,.0f}",
        )  # fmt: skip


def fleets(args: argparse.Namespace) -> None:
    """One row for each rate."""
    for rate in args.rates:
        words = [
            *FLEETS.split(),
            "--requests",
            str(args.requests),
            "--workload",
            CHATS,
            *args.more.split(","),
        ]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads(_headrace([*words, "--rate", f"{rate:.12g}"]))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        _row(f"{rate:,.0f}", *_cells(found), f"{seconds:.0f}", f"{after.ru_maxrss / 1024:.0f}")


def _cells(found: dict[str, Any]) -> list[str]:
    verdict, demand = found["verdict"], found["demand"]
    best = verdict["best"]
    if best is None:
        return [*verdict["refused"]]
    trial = next(each for each in verdict["tried"] if best.items() <= each.items())
    supply = verdict["supply"]
    price = 1 - supply["spot_share"] * (1 - supply["spot_price"])
    dollars = best["dollars_per_hour"] / best["replicas"] * supply["replicas"] * price
    output = 3600 * demand["requests_per_second"] * demand["output_tokens"]
    served = trial["output_tokens_per_second"] * 3600 / output
    return [
        f"{best['replicas']:,}", f"{best['degree']}", f"{best['prefill_replicas']:,}", f"{supply['replicas']:,}",
        f"{100 * trial['attained']:.1f}", f"{100 * (trial['error'] or 0):.1f}", f"{1e3 * trial['ttft_p95']:.0f}",
        f"{1e3 * trial['tpot_p95']:.1f}", f"{100 * served:.0f}", f"{dollars:,.0f}", f"{1e6 * dollars / output:.4f}",
        f"{len(verdict['tried'])}",
    ]  # fmt: skip


def _headrace(words: Sequence[str]) -> str:
    print(f"headrace {shlex.join(words)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def _row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
