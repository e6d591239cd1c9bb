"""Partial answers: what was computed before an answer was interrupted.

- `unfinished_answers`: interrupted answers, resumed when the same request comes again.
"""
