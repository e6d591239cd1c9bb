"""Tenants and classes of service: their weights, limits, accounts and admission.

- `classes`: classes of service.
- `tenants`: limits and weights of each tenant.
- `quota`: usage in sliding windows.
- `gate`: admission control before a request is queued.
- `fair_share`: virtual time of classes and tenants.
- `fairness_index`: Jain's index over max-min fair shares.
"""
