"""Overhead of serving: output tokens per second over HTTP streaming, compared with the engine alone.

Both run the same requests, ``--streams`` at once. The client has its own process; on a small machine it uses a share of
the cores, which the result includes. Warm-up rounds use all of the pools' memory once, because the server caches
prompts and would otherwise continue into memory that the system has to clear first.
"""

from __future__ import annotations

import math

from benchmarks.peers.figures import FIGURES, standings
from benchmarks.stage import arguments, publish, say, server, target
from headrace.cli.bench.targets import make_server_target
from headrace.lab.bench.report import compare
from headrace.lab.workload.dataset import fixed_lengths, log_normal_lengths
from headrace.lab.workload.work import Work


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--spread", action="store_true", help="lengths are log-normal, around these medians")
    parser.add_argument("--warming-rounds", type=int, default=3, help="that fill the pools and do not count")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 30)
    parser.add_argument("--stream-interval", type=int, default=1, help="the server's: tokens in an event")
    args = parser.parse_args()

    def work(number: int) -> tuple[Work, ...]:
        """Others in each round: the server keeps the prompts of those before, which the engine alone forgets."""
        lengths = log_normal_lengths if args.spread else fixed_lengths
        return lengths(args.num_prompts, args.input_len, args.output_len, seed=args.seed + number)

    sizes = {"max_num_seqs": args.streams, "kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    offline = target("offline=headrace", args, **sizes)
    flags = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    flags.append(f"--stream-interval={args.stream_interval}")
    with server(args, *flags) as running:
        served = make_server_target("served", running.url, "", concurrency=args.streams)
        for number in range(args.warming_rounds):
            for each in (offline, served):
                each.run(work(args.rounds + number))
        result = compare([offline, served], work, args.rounds)
    every = [run for runs in result.rounds for run in runs]
    publish("batching-served", args, every, result.middle(), ratios=result.ratios)
    share = result.ratios["served"]["output_tokens_per_second"]
    say(f"served at {100 * share:.1f} % of offline tokens per second, {args.streams} streams")
    (decoding,) = standings(result.rounds, FIGURES["decode"][:1])[1].ratios.values()
    if not math.isnan(decoding):  # where all requests were open at once
        say(f"and at {100 * decoding:.1f} % while all of them decode")
    offline.close()
