"""``headrace bench``: throughput, latency, load, comparisons, calibration and rooflines.

- `commands`: the commands ``throughput``, ``latency``, ``serve`` and ``compare``, and their reports.
- `targets`: engines and servers to measure, and their names on the command line.
- `sweep`: finds the best batch size, concurrency and chunk size.
- `calibrate`: measures this machine for the simulator. `roofline`: compares a step with the machine's bounds.
"""
