"""Operational endpoints.

- `status`: health, models, metrics, usage, the explanation of one request; pause and resume.
- `requests`: a tenant's own calls and sessions, their timelines, and abort. `steps`: steps, simulations, the tour.
- `sleep`: puts the model to sleep and wakes it up.
- `adapters`: LoRA adapters, loaded and unloaded while the server runs.
- `tuning`: experiments on settings, and the tuner. `access_log`: one log record per HTTP request.
"""
