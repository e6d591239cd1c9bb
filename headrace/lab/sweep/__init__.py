"""A sweep finds the plateau of a setting: throughput, latency and memory at each of its values. Files in reading order:

- `trials`: the values, their order, and the time budget.
- `points`: the measurements at each value, as medians over rounds.
- `knee`: where the plateau begins. `bound`: the roofline for comparison.
- `report`, `plot`: tables, JSON, CSV, and one picture.
"""
