"""Speculative decoding, the decisions: which tokens to propose, and how many of them to verify. Pure.

- `proposal`: the values and ports: the rows to draft for, proposals, proposers and the drafter.
- `characters`: tokens as a string that can be searched.
- `ngram`: prompt lookup in the request's own text. `suffix`: past outputs of the tenant.
- `continuation_index`: which tokens followed a given suffix in past outputs. `scoped_indexes`: one such index per
  scope, within one memory limit.
- `known_text`: a pointer into a text that the output probably repeats. `prediction`: the text that the client predicts.
  `cached`: a cached answer.
- `acceptance`: the learned probability that a draft is right.
- `draft_budget`: how many drafted tokens of each row to verify in a step.
- `speed_trials`: whether drafting pays, from the measured tokens per second with and without it.
- `costly_sources`: when to call a draft model, and for how many tokens.
- `drafter`: the drafter that the scheduler calls. `forced`: a drafter in front of it, for tokens that a grammar forces.
"""
