"""Calibrates the simulator: measures steps of a real engine and fits the step times that a simulation uses.

- `measure`: the measurements. `recorder`: times each step of an engine.
- `fit`: step times from measurements. `values`: a calibration, as a file.
"""
