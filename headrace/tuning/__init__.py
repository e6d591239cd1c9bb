"""Changes settings of a running server: the only room that does.

- `experiments`: compares a changed setting with the present one on live traffic.
- `tuner`: searches for better settings within bounds. `steering`: the settings that may change.
- `live`: runs experiments and the tuner beside a service: the clock, the engine thread and the file.
"""
