"""Policies of the engine in virtual time: eviction order, too small pools, queue order and routing."""

from benchmarks.stage import run_part

run_part("benchmarks.policies", "eviction", "pressure", "scheduling")
