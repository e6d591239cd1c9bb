"""Looks responses up in the caches before computing, and writes them afterwards. In reading order:

- `rules`: the decisions, as pure functions. `ports`: what the caches ask of their levels and listeners.
- `query`: one sequence to look up, with its cache keys.
- `lookup`: answers calls: searches the caches, joins computations, submits the rest to the engine.
- `search`: searches the caches for one response.
- `single_flight`: running computations, and the requests that read one of them.
- `exact`, `semantic`, `partial`: the cache levels.
- `replay`: streams a cached response.
- `writer`: writes computed responses to the caches.
- `headers`: the response header ``X-Headrace-Cache``.
- `history`, `warmer`: which requests recur, and computing their responses in idle time.
- `stores`: memory, SQLite, Redis, Memcached.
"""
