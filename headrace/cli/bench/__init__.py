"""``headrace bench``: throughput, latency, load, comparisons, calibration and rooflines.

- `commands`: the commands ``throughput``, ``latency``, ``serve`` and ``compare``.
- `targets`: engines and servers to measure. `workload`: their requests. `report`: tables, plots and files.
- `sweep`: finds the best batch size, concurrency and chunk size. `place`: this machine or a simulated device.
- `calibrate`: measures this machine for the simulator. `roofline`: compares a step with the machine's bounds.
"""
