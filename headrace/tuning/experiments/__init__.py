"""Experiments on live traffic: compare a changed setting with the present one, by time, request or tenant.

- `evidence`: anytime-valid evidence of a difference: an e-process and its confidence sequence.
- `asymptotic`: the same for many units: an asymptotic confidence sequence, with variance reduction (CUPED).
- `measures`: the metrics of a time window, folded from events.
- `units`: the metrics of single requests and tenants. `arms`: assignment of units to arms.
- `spec`: the definition of an experiment, read from JSON.
- `switchback`: the order of the windows, and the differences within their pairs.
- `run`: the common base of all experiments.
- `experiment`: a switchback experiment (by time), stored as JSON across restarts.
- `unit_experiment`: an experiment by request or tenant.
- `power`: the smallest detectable change, and the time to detect it.
- `conductor`: the experiments of a server: one runs, the others are stored.
"""
