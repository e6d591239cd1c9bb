"""One script per published figure; each runs on its own with ``python -m benchmarks.<name>``."""
