"""Decisions of all caches of responses and prefixes, as pure functions and values: no stores and no clock.

Read in this order:

- `response`: exact matches. The key of a response, what may be cached, entries and their encoding.
- `semantic`: similar requests. Vetoes, the score, the calibrated threshold, audits.
- `partial`: interrupted answers, and an index of past outputs.
- `prefix`: why a prompt missed the prefix cache, and retention of the prefixes of sessions.
- `warming`: forecasts of repeated requests, and detection of idle time for computing them ahead.
"""
