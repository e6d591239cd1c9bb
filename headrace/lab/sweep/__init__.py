"""A sweep finds the plateau of a setting: throughput, latency and memory at each of its values. Files in reading order:

- `trials`: what is tried, in which order, and within which budget.
- `points`: what was measured at each value, as medians over rounds.
- `knee`: where the plateau begins. `bound`: the roofline beside the measured values.
- `report`, `plot`: tables, JSON, CSV, and one picture.
"""
