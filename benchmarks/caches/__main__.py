"""Response caches over HTTP: single responses, all levels together, a restart with warming, requests beside warming."""

from benchmarks.stage import run_part

run_part("benchmarks.caches", "responses", "levels", "restart", "beside")
