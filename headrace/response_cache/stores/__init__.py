"""Stores of cached responses: bytes under keys, in this process, in a file, or shared over the network.

- `tier`: wraps a store for the lookup; every fault is a miss.
- `memory`, `sqlite`, `redis`, `memcached`: the stores.
- `generation`: names of entries in a shared store that may lose its data.
- `opening`: opens stores from their addresses.
"""
