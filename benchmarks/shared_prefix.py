"""What a shared system prompt costs the second caller: TTFT over HTTP, one request after the other.

Each round has another system prompt, so that its first request is cold; the others find its blocks. Random tokens
often begin with half a character, which shows no text: token ids are asked for, so that the first token is seen.
"""

from __future__ import annotations

from benchmarks.stage import arguments, publish, say, server
from headrace.cli.bench_targets import make_server_target
from headrace.cli.calibrate import EACH_TOKEN
from headrace.lab.bench.measure import measure
from headrace.lab.bench.stats import median
from headrace.lab.workload.tokens import shared_prefix


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "", rounds=5)
    parser.add_argument("--prefix-len", type=int, default=1000)
    parser.add_argument("--num-prompts", type=int, default=8, help="requests per system prompt")
    args = parser.parse_args()
    runs = []
    with server(args) as running:
        one_by_one = make_server_target("server", running.url, "", concurrency=1, extra_body=EACH_TOKEN)
        one_by_one.run(shared_prefix(2, 64, seed=args.seed + args.rounds))
        for number in range(args.rounds):
            seed = args.seed + number
            work = shared_prefix(args.num_prompts, args.prefix_len, input_len=16, output_len=8, seed=seed)
            runs.append(measure(one_by_one, work))
    times = [[record.ttft or 0.0 for record in run.records] for run in runs]
    first = median([each[0] for each in times])
    later = median([seconds for each in times for seconds in each[1:]])
    publish("shared_prefix", args, runs, [], ttft_first_seconds=first, ttft_later_seconds=later)
    say(
        f"TTFT: first {1000 * first:.1f} ms, later {1000 * later:.1f} ms, {100 * (1 - later / first):.1f} % less"
    )


if __name__ == "__main__":
    main()
