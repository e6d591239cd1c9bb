"""The response cache's decisions: an exact match of everything that can change an answer.

- `key`: the SHA-256 key of a response.
- `cacheability`: which requests may be served from or written to which cache.
- `control`: cache directives of a request, with HTTP's meanings.
- `query`: one sequence as the caches see it.
- `entry`: a cached response, hit, miss, and how long an entry stays fresh.
- `codec`: entries as bytes, with checksum and optional seal.
- `tags`: versions of tags, by which entries are invalidated.
- `sample_pool`: several cached samples for one unseeded request.
- `circuit_breaker`: when to stop using a store that fails.
"""
