"""Decisions of the response caches, as pure functions and values: no stores and no clock, under the law of `core`.

Exact matches:

- `key`: the SHA-256 key of a response.
- `cacheability`: cache directives of a request, and which requests may use which cache.
- `entry`: a cached response, its freshness, its bytes with checksum and optional seal.
- `tags`: versions of tags, by which entries are invalidated.
- `circuit_breaker`: when to stop using a store that fails.

Similar requests:

- `guards`: differences that forbid serving. `frames`: what two texts have in common, and single changes in it.
  `statements`: what a text asks for, what it says of which only one thing can hold, and what belongs to what.
- `spellings`: forms of words and numbers that are equal, and codes that are not. `word_classes`: tables of English
  words.
- `judge`: the score of the evidence, and the decision to serve.
- `calibration`: thresholds that labelled requests certify, in common and for a tenant. `pairs`: pairs for people to
  label, and for the served model as second judge.
- `audits`: whether two answers are equal, how many hits are compared, and when the error bound is exceeded.

Warming:

- `warming`: forecasts of repeated requests, and detection of idle time for computing them ahead.
"""
