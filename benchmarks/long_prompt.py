"""A long prompt among decoding streams: their inter-token latency with chunked prefill, without, and alone.

Only the gaps count that lie between the long prompt's arrival and its first token: over a whole run, its
one very long step without chunks would hide behind the 99th percentile.
"""

from __future__ import annotations

from benchmarks.stage import arguments, publish, say, target
from headrace.lab.bench.measure import measure
from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import median, percentile
from headrace.lab.workload.tokens import long_among_decoders


def gaps_during(run: Run, start: float, end: float) -> list[float]:
    """The streams' gaps that overlap ``[start, end]``."""
    return [
        later - earlier
        for record in run.records[:-1]
        for earlier, later in zip(record.token_seconds, record.token_seconds[1:], strict=False)
        if later >= start and earlier <= end
    ]


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--decoders", type=int, default=16)
    parser.add_argument("--long-len", type=int, default=4000)
    parser.add_argument("--output-len", type=int, default=600, help="tokens of each stream")
    parser.add_argument("--arrival", type=float, default=1.0, help="seconds after the streams")
    args = parser.parse_args()
    chunked = target("chunked=headrace", args)
    whole = target("whole=headrace,enable_chunked_prefill=false", args)
    figures: dict[str, list[float]] = {"alone": [], "chunked": [], "whole": []}
    ttfts: dict[str, list[float]] = {"chunked": [], "whole": []}
    runs = []
    for number in range(args.rounds):
        work = long_among_decoders(
            args.decoders, args.output_len, args.long_len, args.arrival, seed=args.seed + number
        )
        alone = measure(chunked, work[:-1])
        figures["alone"].append(percentile(gaps_during(alone, args.arrival, float("inf")), 99))
        for engine in (chunked, whole):
            run = measure(engine, work)
            intruder = run.records[-1]
            ttft = intruder.ttft or 0.0
            ttfts[engine.name].append(ttft)
            window = gaps_during(run, args.arrival, args.arrival + ttft)
            figures[engine.name].append(percentile(window, 99))
            runs.append(run)
    p99 = {name: median(values) for name, values in figures.items()}
    first = {name: median(values) for name, values in ttfts.items()}
    ratios = {name: p99[name] / p99["alone"] for name in ("chunked", "whole")}
    publish("long_prompt", args, runs, [], itl_p99_seconds=p99, ratios=ratios, ttft_seconds=first)
    for name, seconds in p99.items():
        more = f", {ratios[name]:.2f}x; the prompt's TTFT {first[name]:.2f} s" if name in ratios else ""
        say(f"{name}: p99 inter-token latency {1000 * seconds:.1f} ms{more}")
    for engine in (chunked, whole):
        engine.close()


if __name__ == "__main__":
    main()
