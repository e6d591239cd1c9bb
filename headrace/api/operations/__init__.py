"""Operational endpoints.

- `status`: health, models, metrics, usage, the explanation of one request; pause and resume.
- `requests`: a tenant's own calls and sessions, their timelines, and abort. `steps`: steps, simulations, the tour.
- `served_model`: LoRA adapters, loaded and unloaded while the server runs; puts the model to sleep and wakes it up.
- `tuning`: experiments on settings, and the tuner. `access_log`: one log record per HTTP request.
"""
