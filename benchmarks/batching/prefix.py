"""TTFT of chats that share a system prompt, over HTTP, one request after the other.

Each round has a new system prompt of rules, so its first request is cold. The others have a short question of their own
and find the cached blocks.
"""

from __future__ import annotations

import argparse

from benchmarks.stage import arguments, publish, say, server
from headrace.cli.bench.calibrate import EACH_TOKEN
from headrace.cli.bench.targets import make_server_target
from headrace.lab.bench.report import measure
from headrace.lab.bench.stats import median
from headrace.lab.workload.dataset import shared_system_prompt


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument("--words", type=int, default=605, help="of a system prompt; about 0.6 to a token")
    parser.add_argument("--num-prompts", type=int, default=8, help="requests per system prompt")
    parser.add_argument("--load-format", default="auto", help="dummy: weights of a shape at hand")
    return parser


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Measure, print, write; the seconds to the first token of the first and of the later requests."""
    runs = []
    with server(args, "--load-format", args.load_format) as running:
        seen = EACH_TOKEN if args.load_format == "dummy" else "{}"  # random tokens often show no text
        one_by_one = make_server_target("server", running.url, "", concurrency=1, extra_body=seen)
        one_by_one.run(shared_system_prompt(2, 64, seed=args.seed + args.rounds))
        for number in range(args.rounds):
            work = shared_system_prompt(args.num_prompts, args.words, output_len=8, seed=args.seed + number)
            runs.append(measure(one_by_one, work))
    failed = next(
        (record.error or "no token" for run in runs for record in run.records if record.ttft is None), None
    )
    if failed is not None:
        raise SystemExit(f"a request failed: {failed}")
    times = [[record.ttft or 0.0 for record in run.records] for run in runs]
    first = median([each[0] for each in times])
    later = median([seconds for each in times for seconds in each[1:]])
    publish("batching-prefix", args, runs, [], ttft_first_seconds=first, ttft_later_seconds=later)
    tokens = runs[0].records[0].prompt_tokens
    say(
        f"prompts of {tokens:,} tokens: TTFT first {1000 * first:.1f} ms, later {1000 * later:.1f} ms, "
        f"{100 * (1 - later / first):.1f} % less"
    )
    return {"first": first, "later": later}


def main() -> None:
    """Measure with the options of the command line."""
    measured(parser().parse_args())
