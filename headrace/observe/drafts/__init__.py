"""Metrics and explanations of speculative decoding.

- `ledger`: the metrics. `record`: the explanation of one request's drafts.
"""
