"""Endpoints and request fields of the response caches.

- `wire`: the field ``response_cache`` and the header ``Cache-Control``. `cacheable`: which fields enter the cache key.
- `routes`: statistics, invalidation and feedback. `warm`, `warm_wire`: warming. `question_recorder`: history.
- `pair_comparison`: the served model compares two requests, for the semantic cache.
"""
