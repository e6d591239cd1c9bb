"""Operational endpoints.

- `status`: health, model list, metrics, explanations of requests.
- `usage_report`: usage per tenant. `abort`: cancel a request. `pause`: pause and resume.
- `access_log`: one log record per HTTP request.
- `experiments`, `tuner`: experiments on settings, and the tuner.
"""
