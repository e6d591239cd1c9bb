"""Operational endpoints.

- `status`: health, models, metrics, usage, the explanation of one request; pause and resume.
- `requests`: a tenant's own calls, their timelines, and abort. `steps`: steps, simulations, the tour.
- `tuning`: experiments on settings, and the tuner. `access_log`: one log record per HTTP request.
"""
