"""Builds the response caches from their options.

- `cache`: the response caches. `semantic`: the semantic cache.
- `warming`: the request history and cache warming.
"""
