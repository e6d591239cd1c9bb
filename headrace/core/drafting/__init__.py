"""Speculative decoding, the decisions: which tokens to propose, and how many of them to verify. Pure.

- `proposal`: the values and ports: the rows to draft for, proposals, proposers and the drafter.
- `suffix`: prompt lookup in the request's own text, and past outputs of the tenant.
- `prediction`: a text that the client predicts, or a cached answer.
- `acceptance`: the learned probability that a draft is right.
- `draft_budget`: how many drafted tokens of each row to verify in a step.
- `costly_sources`: when to call a draft model, and for how many tokens.
- `drafter`: the drafter that the scheduler calls. `forced`: a drafter in front of it, for tokens that a grammar forces.
"""
