"""Speculative decoding, the decisions: which tokens to propose, and how many of them to verify. Pure.

- `proposal`: the values and ports: what a proposer is asked, what it proposes.
"""
