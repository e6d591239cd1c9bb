"""Offline tuning: searches settings in virtual time, and evaluates the best ones on a held-out part of the workload.

- `windows`: the parts of a workload, and their time windows.
- `goal`: the objective. `space`: the settings and their values.
- `search`: the search (optuna). `judge`: paired comparison, and the gain with its confidence interval.
- `settings_file`: the commented YAML that a server reads.
"""
