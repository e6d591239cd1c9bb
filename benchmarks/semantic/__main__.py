"""The semantic cache: its rules on labelled queries, the time of a lookup, drafts from similar responses."""

from benchmarks.stage import run_part

run_part("benchmarks.semantic", "rules", "lookup", "drafts")
