"""Stores of cached responses: bytes under keys, in this process, in a file, or shared over the network.

- `tier`: a store as the lookup sees it; every fault is a miss.
- `memory`, `sqlite`, `redis`, `memcached`: the stores.
- `generation`: names in a shared store that may lose its data.
"""
