"""Bounded tuning while serving: small changes of one setting at a time, each adopted only on evidence.

- `steps`: how far each setting may go, and in what steps.
- `signals`: smoothed inputs, with hysteresis.
- `tuner`: which change is tried next; a trial is an experiment of `observe.experiments`.
"""
