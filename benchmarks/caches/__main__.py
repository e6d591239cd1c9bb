"""Response caches over HTTP: single responses, all levels together, and a restart with warming."""

from benchmarks.stage import run_part

run_part("benchmarks.caches", "responses", "levels", "restart")
