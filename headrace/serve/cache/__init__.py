"""Looking answers up in the caches before computing, and writing them afterwards.

- `lookup_request`: what is looked up.
- `lookup`: asks the caches in order, coalesces equal requests, computes what is missing.
- `exact`, `semantic`, `partial`: the levels.
- `single_flight`: one computation that several equal requests read.
- `replay`: streams a cached response.
- `writer`: writes computed answers to the caches.
- `headers`: the ``X-Headrace-Cache`` response header.
- `history`, `warmer`, `background_request`: which requests recur, and computing them ahead.
- `stores`: memory, SQLite, Redis, Memcached.
"""
