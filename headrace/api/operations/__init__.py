"""Operational endpoints.

- `status`: health, model list, metrics, explanations of requests.
- `usage_report`: usage per tenant. `abort`: cancel a request. `pause`: pause and resume.
- `access_log`: one log record per HTTP request.
- `owned_requests`: finds a tenant's requests. `timeline`: the timeline of one. `steps`: steps, simulations, the tour.
- `experiments`, `tuner`: experiments on settings, and the tuner.
"""
