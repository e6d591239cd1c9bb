"""Experiments on live traffic: one changed setting against the present one, by time, by request or by tenant.

- `evidence`: how sure the difference is, at any time: an e-process and its confidence sequence.
- `asymptotic`: the same for many units: an asymptotic confidence sequence, and the prediction that narrows it.
- `sketch`: a distribution in a few hundred numbers.
- `measures`: the metrics of a time window, folded from events.
- `units`: the metrics of single requests and tenants. `arms`: which of them have the treatment.
- `spec`: what an experiment is, read from JSON.
- `switchback`: the order of the windows, and the differences within their pairs.
- `run`: what all experiments have in common.
- `experiment`: one by time: windows in, settings and a decision out; as JSON across restarts.
- `unit_experiment`: one by request or tenant.
- `power`: how large a change is found, and after how long.
- `conductor`: the experiments of a server: one runs, the others are stored.
"""
