"""Endpoints of the response caches.

- `routes`: statistics, invalidation and feedback. `warm`, `warm_wire`: warming. `question_recorder`: history.
- `pair_comparison`: the served model compares two requests, for the semantic cache.
"""
