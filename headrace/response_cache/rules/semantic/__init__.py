"""The semantic cache's decisions: when a similar request's response may be served.

- `guards`, `opposites` and `word_classes`: differences in numbers, names, polarity and words that veto a match.
- `score`: the probability that two requests have one answer.
- `numerals`: one written form for numbers.
- `judge`: vetoes first, then the calibrated threshold, then a cross-encoder. `verdicts`: what the served model says.
- `bounds`: exact error bounds, and the threshold that they allow.
- `calibration`: the result of calibrating, as JSON.
- `answer_equality`: whether two answers say the same.
- `audits`: sequential tests that disable a partition whose error bound no longer holds. `audit_rate`: how many hits are
  audited.
"""
