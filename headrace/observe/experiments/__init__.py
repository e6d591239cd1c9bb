"""Experiments on live traffic: one changed setting against the present one, in randomized pairs of time windows.

- `evidence`: how sure the difference is, at any time: an e-process and its confidence sequence.
- `sketch`: a distribution in a few hundred numbers.
- `measures`: the metrics of a time window, folded from events.
- `spec`: what an experiment is, read from JSON.
- `switchback`: the order of the windows, and the differences within their pairs.
- `experiment`: one experiment: windows in, settings and a decision out; as JSON across restarts.
- `conductor`: the experiments of a server: one runs, the others are stored.
"""
