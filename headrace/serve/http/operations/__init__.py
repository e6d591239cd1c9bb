"""Operational endpoints.

- `status`: health, model list, metrics, explanations of requests.
- `usage_report`: usage per tenant. `abort`: abort a request.
"""
