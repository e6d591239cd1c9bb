"""Tenants and classes of service: their weights, limits, shares of the device, and admission.

- `tenants`: the terms of tenants and classes, as values.
- `gate`: whether a request may enter the queue. `quota`: rate limits.
- `fair_share`: virtual time of classes and tenants. `kv_limits`: bounds on their KV memory.
"""
