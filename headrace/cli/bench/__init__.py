"""``headrace bench``: throughput, latency, load, comparisons, calibration and rooflines.

- `commands`: the commands ``throughput``, ``latency``, ``serve`` and ``compare``.
- `targets`: what can be measured. `workload`: which requests are sent. `report`: tables, plots and files.
- `sweep`: finds the best batch size, concurrency and chunk size. `place`: where settings are tried.
- `calibrate`: measures this machine for the simulator. `roofline`: what the machine allows a step.
"""
