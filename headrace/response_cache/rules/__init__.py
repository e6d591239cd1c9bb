"""Decisions of the response caches, as pure functions and values: no stores and no clock, under the law of `core`.

- `response`: exact matches. The key of a response, what may be cached, entries and their encoding.
- `semantic`: similar requests. Vetoes, the score, the calibrated threshold, audits.
- `partial`: interrupted answers.
- `warming`: forecasts of repeated requests, and detection of idle time for computing them ahead.
"""
