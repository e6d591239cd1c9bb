"""Partial answers: what was computed before an answer was interrupted, and what past outputs continue with.

- `unfinished_answers`: interrupted answers, resumed when the same request comes again.
- `continuation_index`: which tokens followed a given suffix in past outputs.
- `scoped_indexes`: one such index per scope, within one memory limit.
"""
