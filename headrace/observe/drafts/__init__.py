"""Speculative decoding in numbers.

- `ledger`: the metrics. `record`: the explanation of one request's drafts.
"""
