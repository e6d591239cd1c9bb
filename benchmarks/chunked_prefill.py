"""Inter-token latency of decoding streams during the prefill of a long prompt: chunked, not chunked, and undisturbed.

Only gaps between the arrival of the long prompt and its first token count. Over a whole run, the one very long step
without chunks would not show in the 99th percentile.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from benchmarks.stage import arguments, publish, say, target
from headrace.lab.bench.report import Run, measure
from headrace.lab.bench.stats import median, percentile
from headrace.lab.workload.dataset import long_among_decoders


def gaps_during(run: Run, start: float, end: float) -> list[float]:
    """The streams' gaps that overlap ``[start, end]``."""
    return [
        later - earlier
        for record in run.records[:-1]
        for earlier, later in pairwise(record.token_seconds)
        if later >= start and earlier <= end
    ]


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--decoders", type=int, default=16)
    parser.add_argument("--long-len", type=int, default=4000)
    parser.add_argument("--output-len", type=int, default=1800, help="tokens of each stream")
    args = parser.parse_args()
    chunked = target("chunked=headrace", args)
    whole = target("whole=headrace,enable_chunked_prefill=false", args)
    figures: dict[str, list[float]] = {"alone": [], "chunked": [], "whole": []}
    ttfts: dict[str, list[float]] = {"chunked": [], "whole": []}
    runs = []
    for number in range(args.rounds):
        work = long_among_decoders(args.decoders, args.output_len, args.long_len, seed=args.seed + number)
        alone = measure(chunked, work[:-1])
        arrival = 0.2 * alone.summary.seconds
        work = (*work[:-1], dataclasses.replace(work[-1], arrival=arrival))
        for engine in (chunked, whole):
            run = measure(engine, work)
            first = run.records[-1].token_seconds[0]
            if min(record.finished for record in run.records[:-1]) < first:
                raise RuntimeError(
                    "the streams ended before the long prompt's first token: raise --output-len"
                )
            if engine is chunked:  # the same stretch of the undisturbed run: contexts as long
                figures["alone"].append(percentile(gaps_during(alone, arrival, first), 99))
            ttfts[engine.name].append(first - arrival)
            figures[engine.name].append(percentile(gaps_during(run, arrival, first), 99))
            runs.append(run)
    p99 = {name: median(values) for name, values in figures.items()}
    ttft = {name: median(values) for name, values in ttfts.items()}
    ratios = {name: p99[name] / p99["alone"] for name in ("chunked", "whole")}
    publish("batching-chunks", args, runs, [], itl_p99_seconds=p99, ratios=ratios, ttft_seconds=ttft)
    for name, seconds in p99.items():
        more = f", {ratios[name]:.2f}x; the prompt's TTFT {ttft[name]:.2f} s" if name in ratios else ""
        say(f"{name}: p99 inter-token latency {1000 * seconds:.1f} ms{more}")
    for engine in (chunked, whole):
        engine.close()


if __name__ == "__main__":
    main()
