"""Continuous batching and what it shares: compared with static batches, chunked prefill, shared prefixes, HTTP."""

from benchmarks.stage import run_part

run_part("benchmarks.batching", "static", "chunks", "prefix", "served")
