"""Looks responses up in the caches before computing, and writes them afterwards. In reading order:

- `rules`: the decisions, as pure functions.
- `query`: one sequence to look up, and its keys. `ports`: what the caches ask of their levels and listeners.
- `lookup`: answers calls: makes keys, searches the caches, joins computations, submits the rest to the engine.
- `single_flight`: one computation, and the requests that read it; how a cached response is read.
- `writer`: writes computed responses to the caches.
- `exact`, `semantic`, `partial`: the cache levels. `stores`: memory, SQLite, Redis, Memcached.
- `history`, `warmer`: which requests recur, and computing their responses in idle time.
- `estimate`: what all of them would save on logged requests.
- `opening`: opens all of them from their options.
"""
