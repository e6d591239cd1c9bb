"""Speculative decoding, the decisions: which tokens to propose, and how many of them to verify. Pure.

- `proposal`: the values and ports: what a proposer is asked, what it proposes.
- `characters`: tokens as a string that can be searched.
- `ngram`: prompt lookup in the request's own text. `suffix`: past outputs of the tenant.
- `known_text`: follows a text that the output probably repeats. `prediction`: the client's. `cached`: a cached answer.
- `acceptance`: the learned probability that a draft is right.
- `draft_budget`: how many drafted tokens of each row pay in a step.
- `pace_trials`: whether drafting pays, by the measured tokens per second with and without.
- `costly_sources`: when a draft model is asked.
- `drafter`: all of it together, as the scheduler uses it. `forced`: what grammars force comes before it.
"""
