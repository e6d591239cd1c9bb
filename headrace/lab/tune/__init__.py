"""Offline tuning: searches settings in virtual time, and judges the best ones on a held-out part of the workload.

- `windows`: the parts of a workload, and its windows of time.
- `goal`: what is optimized. `space`: the settings with the values that are tried.
- `search`: the search (optuna). `judge`: alternating pairs of windows, and the gain with its interval.
- `settings_file`: the commented YAML that a server reads.
"""
