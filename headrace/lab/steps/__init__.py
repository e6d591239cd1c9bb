"""Small simulated runs for viewing step by step.

- `scenario`: a small workload with its settings, and their bounds. `tour`: the stops of the guided tour.
- `camera`: sees an engine's steps in virtual time. `recording`: the steps of a recorded scheduler trace.
"""
