"""Speculative decoding: speed on texts, speed at a given acceptance rate, outputs compared with those without."""

from benchmarks.stage import run_part

run_part("benchmarks.drafts", "texts", "forced", "lossless")
