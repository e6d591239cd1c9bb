"""Stores of cached responses: bytes under keys, in this process, in a file, or shared over the network.

- `tier`: wraps a store for the lookup; every fault is a miss.
- `memory`, `sqlite`, `redis`, `memcached`: the stores.
- `row_feed`: what a store offers to share rows of the semantic cache. `redis_rows`: these in Redis.
- `generation`: names of entries in a shared store that may lose its data.
- `opening`: opens stores from their addresses.
"""
